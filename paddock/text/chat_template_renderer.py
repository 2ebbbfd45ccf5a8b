"""Conversations in tokens by the chat template of a model's own folder, whatever its family.

Such a template is a text with holes; it does not say who wrote what. Who did is found by rendering
twice: what the text gains when a reply is added is the reply. That holds only for templates that
go on from what they said before; the others are refused (RewritesPast), reply by reply.
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

# A character that means nothing to anyone. Put inside what a text spells like a marker, it takes it
# past the template; it is taken out again before the text is encoded.
_GUARD = "\ufdd0"


class ChatTemplateRenderer:
    """The template in a model's folder.

    Nothing that a message or a tool says can spell a marker, but for <think> and </think> in an
    assistant's content: there they stand where a template knows no reasoning.
    `specials_in_text=True` encodes all text as transformers does.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, *, specials_in_text: bool = False
    ) -> None:
        self.tokenizer, self.template = tokenizer, template
        spelled = sorted(
            (t for t in tokenizer.added_tokens if len(t.strip()) > 1), key=len, reverse=True
        )
        self._marker = _any_of(spelled)
        self._marker_in_content = _any_of([t for t in spelled if t not in _THINK])
        self._specials_in_text = specials_in_text

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """What the template puts after a reply, and the end of a document."""
        text = self._text((_ask("x"), Message(role="assistant", content="y")))
        ids = self._ids(text)
        found = [*ids[self._closing(ids) :][:1], self.tokenizer.eos_token_id]
        return tuple(dict.fromkeys(token for token in found if token is not None))

    def render_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        thinking: ThinkingKwargs = DEFAULT_THINKING,
        most: int | None = None,
    ) -> RenderedTokens:
        check_message_count(messages, most)
        text = self._text(messages, tools, thinking, opened=True)
        self._refuse_longer(text, most)
        return rendered_from_rows(self._others(text, self._ids(text), messages, 0))

    def render_dialogue(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        thinking: ThinkingKwargs = DEFAULT_THINKING,
        closed: bool = True,
        most: int | None = None,
    ) -> RenderedTokens:
        check_message_count(messages, most)
        if most is not None:
            self._refuse_longer(self._text(messages, tools, thinking), most)
        rows: list[TokenRow] = []
        done, before, first = "", "", 0  # all the text, its last piece, the first message not in it
        for k, message in enumerate(messages):
            if message.role != "assistant":
                continue
            asked = self._text(messages[:k], tools, thinking, opened=True)
            said = self._text(messages[: k + 1], tools, thinking)
            new = self._gained(done, asked, f"messages[{first}:{k}]")
            rows += self._others(new, self._following(before, new), messages[first:k], first)
            reply = self._gained(asked, said, f"messages[{k}]")
            ids = self._following(new, reply)
            if not closed and k == len(messages) - 1:
                ids = ids[: self._closing(ids)]
            rows += self._reply(ids, k)
            done, before, first = said, reply, k + 1
        if first < len(messages):
            text = self._text(messages, tools, thinking)
            new = self._gained(done, text, f"messages[{first}:]")
            rows += self._others(new, self._following(before, new), messages[first:], first)
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
        asked = self._text(messages[:last], tools, thinking, opened=True)
        said = self._gained(asked, self._text(messages, tools, thinking), f"messages[{last}]")
        prompt = self._others(asked, self._ids(asked), messages[:last], 0)
        return rendered_from_rows([*prompt, *self._reply(self._following(asked, said), last)])

    def render_next_turn(
        self,
        past: Sequence[int],
        messages: Sequence[Message],
        *,
        thinking: ThinkingKwargs = DEFAULT_THINKING,
        answering: Message | None = None,
    ) -> RenderedTokens:
        """What the template puts after a stand-in for the session. The stop that was sampled is
        not said again; if another was, or none, the template's own follows."""
        check_no_assistant_messages(messages)
        session = (_ask("x"), answering or _stand_in(messages, thinking))
        before = self._text(session, thinking=thinking)
        after = self._text((*session, *messages), thinking=thinking, opened=True)
        new = self._gained(before, after, "the new messages")
        ids = self._ids(before)
        closing = ids[self._closing(ids) :]
        if past and closing and past[-1] == closing[0]:
            closing = closing[1:]
        elif is_in_reasoning(self.tokenizer, past):
            closing = [self.tokenizer.special_token_ids[SpecialToken.THINK_CLOSE], *closing]
        return rendered_from_rows(
            [*map(_scaffold, closing), *self._others(new, self._ids(new), messages, 0)]
        )

    def ignored_kwargs(self, thinking: ThinkingKwargs) -> dict[str, str]:
        why = f"the chat template of {self.template.name} does not mention it"
        return {name: why for name in thinking.as_kwargs if name not in self.template.variables}

    # --- text

    def _text(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        thinking: ThinkingKwargs = DEFAULT_THINKING,
        *,
        opened: bool = False,
    ) -> str:
        if not self._specials_in_text:
            messages = [self._guarded(message) for message in messages]
            tools = [_changed_tool(tool, _guard(self._marker)) for tool in tools]
        return self.template.render(
            messages, tools=tools, thinking=thinking, add_generation_prompt=opened
        )

    def _gained(self, before: str, after: str, what: str) -> str:
        if after.startswith(before):
            return after[len(before) :]
        same = common_prefix_length(before, after)
        raise NotPrefixPreservingError(
            f"the chat template of {self.template.name} changes what it said when it comes to"
            f" {what}: {_near(before, same)!r} becomes {_near(after, same)!r}"
        )

    def _guarded(self, message: Message) -> Message:
        guard = _guard(self._marker)
        own = self._marker_in_content if message.role == "assistant" else self._marker
        return replace(
            message,
            content=_guard(own)(message.content),
            reasoning=None if message.reasoning is None else guard(message.reasoning),
            tool_calls=tuple(_changed_call(call, guard) for call in message.tool_calls),
        )

    # --- tokens

    def _refuse_longer(self, text: str, most: int | None) -> None:
        if most is not None:
            self.tokenizer.check_max_tokens([text.replace(_GUARD, "")], most, specials=True)

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

    def _following(self, before: str, text: str) -> list[int]:
        """`text` in the tokens it has after `before`, unless they grow together with its last."""
        first, both = self._ids(before), self._ids(before + text)
        return both[len(first) :] if both[: len(first)] == first else self._ids(text)

    def _closing(self, ids: Sequence[int]) -> int:
        """Where in a reply's tokens the template closes it: at a silent token with at most blanks
        after it."""
        at = max((i for i, token in enumerate(ids) if self.tokenizer.is_special(token)), default=-1)
        closes = at >= 0 and not self.tokenizer.decode(ids[at + 1 :]).strip()
        return at if closes else len(ids)

    def _reply(self, ids: Sequence[int], message: int) -> Iterator[TokenRow]:
        """The model says all up to the token that stops it; what follows is the template's."""
        stop = self._closing(ids)
        for i, token in enumerate(ids):
            said = i <= stop
            yield token, "assistant" if said else "template", said, message

    def _others(
        self, text: str, ids: Sequence[int], messages: Sequence[Message], first: int
    ) -> Iterator[TokenRow]:
        """Tokens of a prompt: a message's where its content stands, else the template's."""
        text = text.replace(_GUARD, "")
        spans: list[tuple[int, int, TokenSource, int]] = []
        at = 0
        for i, message in enumerate(messages, first):
            content = message.content if message.content in text[at:] else message.content.strip()
            start = text.find(content, at)
            if content and start >= 0:
                at = start + len(content)
                spans.append((start, at, message.role, i))
        growing, position = IncrementalDetokenizer(self.tokenizer), 0
        for token in ids:
            while spans and spans[0][1] <= position:
                spans.pop(0)
            inside = bool(spans) and spans[0][0] <= position
            yield (token, spans[0][2], False, spans[0][3]) if inside else _scaffold(token)
            position += len(growing.push(token))


_THINK = (SpecialToken.THINK_OPEN, SpecialToken.THINK_CLOSE)


def _scaffold(token: int) -> TokenRow:
    return token, "template", False, None


def _ask(text: str) -> Message:
    return Message(role="user", content=text)


def _stand_in(messages: Sequence[Message], thinking: ThinkingKwargs) -> Message:
    """A reply that `messages` could follow; it thought, unless told not to."""
    answered = dict.fromkeys(m.tool_call_id for m in messages if m.tool_call_id is not None)
    return Message(
        role="assistant",
        content="y",
        reasoning=None if thinking.enable_thinking is False else "z",
        tool_calls=tuple(ToolCall(id=name, name="f") for name in answered),
    )


def _near(text: str, at: int) -> str:
    return text[max(0, at - 20) : at + 20]


# --- guarding -------------------------------------------------------------------------------------


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


def _guard(marker: re.Pattern[str]) -> Callable[[str], str]:
    def guard(text: str) -> str:
        plain = text.replace(_GUARD, "")
        return marker.sub(lambda found: f"{found[0][0]}{_GUARD}{found[0][1:]}", plain)

    return guard


def _changed_call(call: ToolCall, change: Callable[[str], str]) -> ToolCall:
    return ToolCall(
        id=call.id, name=change(call.name), arguments=_changed(dict(call.arguments), change)
    )


def _changed_tool(tool: ToolSpec, change: Callable[[str], str]) -> ToolSpec:
    return ToolSpec(
        name=change(tool.name),
        description=change(tool.description),
        parameters=_changed(dict(tool.parameters), change),
    )


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every text in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _changed(item, change) for key, item in value.items()}
    return [_changed(item, change) for item in value] if isinstance(value, list) else value
