"""Renderer for any Hugging Face chat template.

A template does not tell which text comes from which message. It is rendered with and without each
reply; the added text is the reply. This requires a prefix-preserving template: others raise
NotPrefixPreservingError.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from paddock.records import Message, ToolCall, ToolSpec
from paddock.text.chat_template import DEFAULT_THINKING, ChatTemplate, ThinkingKwargs
from paddock.text.completion_parser import is_in_reasoning
from paddock.text.renderer import (
    NotPrefixPreservingError,
    RenderedTokens,
    TokenRow,
    TokenSource,
    check_ends_with_assistant,
    check_message_count,
    check_no_assistant_messages,
    common_prefix_length,
    rendered_from_rows,
)
from paddock.text.special_tokens import SpecialToken
from paddock.text.tokenizer import IncrementalDetokenizer, Tokenizer

# A Unicode noncharacter. Inserted into message text that looks like a special token, it carries the
# text through the template unharmed; it is removed before the text is encoded.
_GUARD = "\ufdd0"


class ChatTemplateRenderer:
    """Renders with the chat template of a checkpoint.

    Text of messages and tools never becomes a special token, except <think> and </think> in
    assistant content, for templates without a reasoning field. `specials_in_text=True` encodes all
    text as transformers does.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, *, specials_in_text: bool = False
    ) -> None:
        self.tokenizer, self.template = tokenizer, template
        added = sorted(
            (t for t in tokenizer.added_tokens if len(t.strip()) > 1), key=len, reverse=True
        )
        self._marker = _any_of(added)
        self._marker_in_content = _any_of([t for t in added if t not in _THINK])
        self._specials_in_text = specials_in_text

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The token that the template puts after a reply, and EOS."""
        text = self._text((_user_message("x"), Message(role="assistant", content="y")))
        ids = self._ids(text)
        found = [*ids[self._stop_index(ids) :][:1], self.tokenizer.eos_token_id]
        return tuple(dict.fromkeys(token for token in found if token is not None))

    def render_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        thinking: ThinkingKwargs = DEFAULT_THINKING,
        max_tokens: int | None = None,
    ) -> RenderedTokens:
        check_message_count(messages, max_tokens)
        text = self._text(messages, tools, thinking, add_generation_prompt=True)
        self._check_max_tokens(text, max_tokens)
        return rendered_from_rows(self._prompt_rows(text, self._ids(text), messages, 0))

    def render_dialogue(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        thinking: ThinkingKwargs = DEFAULT_THINKING,
        closed: bool = True,
        max_tokens: int | None = None,
    ) -> RenderedTokens:
        check_message_count(messages, max_tokens)
        if max_tokens is not None:
            self._check_max_tokens(self._text(messages, tools, thinking), max_tokens)
        rows: list[TokenRow] = []
        rendered, before, first = "", "", 0  # all text, its last part, the first message not in it
        for k, message in enumerate(messages):
            if message.role != "assistant":
                continue
            prompt_text = self._text(messages[:k], tools, thinking, add_generation_prompt=True)
            full_text = self._text(messages[: k + 1], tools, thinking)
            new = self._added_text(rendered, prompt_text, f"messages[{first}:{k}]")
            rows += self._prompt_rows(
                new, self._encode_after(before, new), messages[first:k], first
            )
            reply = self._added_text(prompt_text, full_text, f"messages[{k}]")
            ids = self._encode_after(new, reply)
            if not closed and k == len(messages) - 1:
                ids = ids[: self._stop_index(ids)]
            rows += self._reply_rows(ids, k)
            rendered, before, first = full_text, reply, k + 1
        if first < len(messages):
            text = self._text(messages, tools, thinking)
            new = self._added_text(rendered, text, f"messages[{first}:]")
            rows += self._prompt_rows(new, self._encode_after(before, new), messages[first:], first)
        return rendered_from_rows(rows)

    def render_last_reply(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        thinking: ThinkingKwargs = DEFAULT_THINKING,
    ) -> RenderedTokens:
        check_ends_with_assistant(messages)
        last = len(messages) - 1
        prompt_text = self._text(messages[:last], tools, thinking, add_generation_prompt=True)
        reply_text = self._added_text(
            prompt_text, self._text(messages, tools, thinking), f"messages[{last}]"
        )
        prompt = self._prompt_rows(prompt_text, self._ids(prompt_text), messages[:last], 0)
        return rendered_from_rows(
            [*prompt, *self._reply_rows(self._encode_after(prompt_text, reply_text), last)]
        )

    def render_next_turn(
        self,
        past: Sequence[int],
        messages: Sequence[Message],
        *,
        thinking: ThinkingKwargs = DEFAULT_THINKING,
        answering: Message | None = None,
    ) -> RenderedTokens:
        """The text that the template adds after a placeholder session. A sampled stop token is not
        repeated; after another one, or none, the template's own follows."""
        check_no_assistant_messages(messages)
        session = (_user_message("x"), answering or _placeholder_reply(messages, thinking))
        before = self._text(session, thinking=thinking)
        after = self._text((*session, *messages), thinking=thinking, add_generation_prompt=True)
        new = self._added_text(before, after, "the new messages")
        ids = self._ids(before)
        closing = ids[self._stop_index(ids) :]
        if past and closing and past[-1] == closing[0]:
            closing = closing[1:]
        elif is_in_reasoning(self.tokenizer, past):
            closing = [self.tokenizer.special_token_ids[SpecialToken.THINK_CLOSE], *closing]
        return rendered_from_rows(
            [*map(_template_row, closing), *self._prompt_rows(new, self._ids(new), messages, 0)]
        )

    def ignored_kwargs(self, thinking: ThinkingKwargs) -> dict[str, str]:
        why = f"the chat template of {self.template.name} does not use it"
        return {name: why for name in thinking.as_kwargs if name not in self.template.variables}

    # --- text

    def _text(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        thinking: ThinkingKwargs = DEFAULT_THINKING,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        if not self._specials_in_text:
            messages = [self._guard_message(message) for message in messages]
            tools = [_map_tool(tool, _guard(self._marker)) for tool in tools]
        return self.template.render(
            messages, tools=tools, thinking=thinking, add_generation_prompt=add_generation_prompt
        )

    def _added_text(self, before: str, after: str, what: str) -> str:
        if after.startswith(before):
            return after[len(before) :]
        same = common_prefix_length(before, after)
        raise NotPrefixPreservingError(
            f"the chat template of {self.template.name} changes earlier text when it renders"
            f" {what}: {_excerpt(before, same)!r} becomes {_excerpt(after, same)!r}"
        )

    def _guard_message(self, message: Message) -> Message:
        guard = _guard(self._marker)
        own = self._marker_in_content if message.role == "assistant" else self._marker
        return replace(
            message,
            content=_guard(own)(message.content),
            reasoning=None if message.reasoning is None else guard(message.reasoning),
            tool_calls=tuple(_map_call(call, guard) for call in message.tool_calls),
        )

    # --- tokens

    def _check_max_tokens(self, text: str, max_tokens: int | None) -> None:
        if max_tokens is not None:
            self.tokenizer.check_max_tokens([text.replace(_GUARD, "")], max_tokens, specials=True)

    def _ids(self, text: str) -> list[int]:
        if _GUARD not in text:
            return self.tokenizer.encode(text, specials=True)
        ids: list[int] = []
        start = 0
        for found in [*self._marker.finditer(text), None]:
            plain = text[start : found.start() if found else None].replace(_GUARD, "")
            if start:
                ids += self.tokenizer.encode_continuation(plain)
            else:
                ids += self.tokenizer.encode(plain, specials=False)
            if found:
                ids += self.tokenizer.encode(found[0], specials=True)
                start = found.end()
        return ids

    def _encode_after(self, before: str, text: str) -> list[int]:
        """The tokens of `text` after `before`, unless tokens merge across the boundary."""
        first, both = self._ids(before), self._ids(before + text)
        return both[len(first) :] if both[: len(first)] == first else self._ids(text)

    def _stop_index(self, ids: Sequence[int]) -> int:
        """The index at which the template closes a reply: a special token with at most whitespace
        after it."""
        at = max((i for i, token in enumerate(ids) if self.tokenizer.is_special(token)), default=-1)
        closes = at >= 0 and not self.tokenizer.decode(ids[at + 1 :]).strip()
        return at if closes else len(ids)

    def _reply_rows(self, ids: Sequence[int], message: int) -> Iterator[TokenRow]:
        """Tokens up to the stop token come from the model, the rest from the template."""
        stop = self._stop_index(ids)
        for i, token in enumerate(ids):
            sampled = i <= stop
            yield token, "assistant" if sampled else "template", sampled, message

    def _prompt_rows(
        self, text: str, ids: Sequence[int], messages: Sequence[Message], first: int
    ) -> Iterator[TokenRow]:
        """Prompt tokens: from a message where its content is found, else from the template."""
        text = text.replace(_GUARD, "")
        spans: list[tuple[int, int, TokenSource, int]] = []
        at = 0
        for i, message in enumerate(messages, first):
            content = message.content if message.content in text[at:] else message.content.strip()
            start = text.find(content, at)
            if content and start >= 0:
                at = start + len(content)
                spans.append((start, at, message.role, i))
        detokenizer, position = IncrementalDetokenizer(self.tokenizer), 0
        for token in ids:
            while spans and spans[0][1] <= position:
                spans.pop(0)
            inside = bool(spans) and spans[0][0] <= position
            yield (token, spans[0][2], False, spans[0][3]) if inside else _template_row(token)
            position += len(detokenizer.push(token))


_THINK = (SpecialToken.THINK_OPEN, SpecialToken.THINK_CLOSE)


def _template_row(token: int) -> TokenRow:
    return token, "template", False, None


def _user_message(text: str) -> Message:
    return Message(role="user", content=text)


def _placeholder_reply(messages: Sequence[Message], thinking: ThinkingKwargs) -> Message:
    """A reply that `messages` could follow, with reasoning unless thinking is off."""
    answered = dict.fromkeys(m.tool_call_id for m in messages if m.tool_call_id is not None)
    return Message(
        role="assistant",
        content="y",
        reasoning=None if thinking.enable_thinking is False else "z",
        tool_calls=tuple(ToolCall(id=name, name="f") for name in answered),
    )


def _excerpt(text: str, at: int) -> str:
    return text[max(0, at - 20) : at + 20]


# --- guards ---------------------------------------------------------------------------------------


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


def _guard(marker: re.Pattern[str]) -> Callable[[str], str]:
    def guard(text: str) -> str:
        plain = text.replace(_GUARD, "")
        return marker.sub(lambda found: f"{found[0][0]}{_GUARD}{found[0][1:]}", plain)

    return guard


def _map_call(call: ToolCall, function: Callable[[str], str]) -> ToolCall:
    return ToolCall(
        id=call.id, name=function(call.name), arguments=_map_strings(dict(call.arguments), function)
    )


def _map_tool(tool: ToolSpec, function: Callable[[str], str]) -> ToolSpec:
    return ToolSpec(
        name=function(tool.name),
        description=function(tool.description),
        parameters=_map_strings(dict(tool.parameters), function),
    )


def _map_strings(value: Any, function: Callable[[str], str]) -> Any:
    """A JSON value with `function` applied to every string."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, dict):
        return {function(key): _map_strings(item, function) for key, item in value.items()}
    return [_map_strings(item, function) for item in value] if isinstance(value, list) else value
