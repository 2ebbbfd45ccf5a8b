"""GLM-5's conversations in tokens.

`glm5.jinja` says what a conversation looks like; here the same is laid out piece by piece, so that
every token knows where it comes from. Joined, the pieces are the Jinja text, for every version and
setting (tests/text/test_glm.py).

A reply ends where the next role begins: <|user|> or <|observation|> after a reply is what the model
says to stop. So that token belongs to the reply and is trained; <|assistant|>, the <think> or
</think> that a prompt ends in, other roles and their words are not.
"""

import json
import re
from collections.abc import Iterator, Sequence

from paddock.records import Message, ToolCall, ToolSpec
from paddock.text.chat_template import (
    DEFAULT_THINKING,
    GLM_TEMPLATE_VARIANTS,
    GlmTemplateVariant,
    GlmVersion,
    ThinkingKwargs,
    glm_chat_template,
    ignored_thinking_kwargs,
    tool_to_openai,
)
from paddock.text.completion_parser import is_in_reasoning
from paddock.text.renderer import (
    NotPrefixPreservingError,
    RenderedTokens,
    TemplateSpan,
    check_ends_with_assistant,
    check_message_count,
    check_no_assistant_messages,
    encode_spans,
)
from paddock.text.special_tokens import SpecialToken
from paddock.text.tokenizer import Tokenizer

_TOOLS_BEFORE = """
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_TOOLS_AFTER = """</tools>

For each function call, output the function name and arguments within the following XML format:
"""
_TOOLS_EXAMPLE = (
    "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>"
    "<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>"
)
_MARKERS = re.compile(f"({'|'.join(map(re.escape, SpecialToken))})")
_TOOLS_EXAMPLE_PARTS = tuple(
    SpecialToken(part) if _MARKERS.fullmatch(part) else part
    for part in _MARKERS.split(_TOOLS_EXAMPLE)
)
_OPENERS = {
    "user": SpecialToken.USER,
    "tool": SpecialToken.OBSERVATION,
    "system": SpecialToken.SYSTEM,
}


def _head(
    rules: GlmTemplateVariant, tools: Sequence[ToolSpec], thinking: ThinkingKwargs
) -> Iterator[TemplateSpan]:
    yield TemplateSpan(SpecialToken.GMASK)
    yield TemplateSpan(SpecialToken.SOP)
    effort = rules.reasoning_effort(thinking)
    if effort is not None:
        yield TemplateSpan(SpecialToken.SYSTEM)
        yield TemplateSpan(f"Reasoning Effort: {effort.capitalize()}")
    if tools:
        dicts = (tool_to_openai(tool) for tool in tools)
        shown = (d if rules.wraps_tools else d["function"] for d in dicts)
        lines = "".join(json.dumps(d, ensure_ascii=False) + "\n" for d in shown)
        yield TemplateSpan(SpecialToken.SYSTEM)
        yield TemplateSpan(_TOOLS_BEFORE + lines + _TOOLS_AFTER)
        yield from map(TemplateSpan, _TOOLS_EXAMPLE_PARTS)


def _body(
    rules: GlmTemplateVariant,
    messages: Sequence[Message],
    thinking: ThinkingKwargs,
    answering: Message | None = None,
) -> Iterator[TemplateSpan]:
    """`answering` is the reply before the first message, if that is already in tokens."""
    last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
    for i, message in enumerate(messages):
        before = messages[i - 1] if i else answering
        marker = _OPENERS.get(message.role, SpecialToken.ASSISTANT)
        opener = TemplateSpan(marker, message=i)
        if i and messages[i - 1].role == "assistant" and message.role in ("user", "tool"):
            opener = TemplateSpan(marker, "assistant", i - 1, trained=True)
        match message.role:
            case "assistant":
                yield opener
                yield from _reply(rules, message, i, thinking, newest=i > last_user)
            case "tool":
                if before is None or before.role != "tool":
                    yield opener
                    yield from _results(rules, messages, i, before)
            case role:
                yield opener
                yield TemplateSpan(message.content, role, i)


def _reply(
    rules: GlmTemplateVariant, message: Message, i: int, thinking: ThinkingKwargs, *, newest: bool
) -> Iterator[TemplateSpan]:
    def said(text: str) -> TemplateSpan:
        return TemplateSpan(text, "assistant", i, trained=True)

    thought, content = _thought(rules, message)
    kept = newest or not rules.clears_reasoning(thinking)
    if thought is not None and (rules.opens or thought) and kept:
        yield TemplateSpan(SpecialToken.THINK_OPEN, message=i)
        yield said(thought if rules.opens else thought.strip())
        yield said(SpecialToken.THINK_CLOSE)
    elif rules.opens or (rules.opens_newest and newest and rules.is_thinking_enabled(thinking)):
        yield TemplateSpan(SpecialToken.THINK_OPEN, message=i)
        # A model that was asked to think closed it at once. Where thoughts were left out it did
        # not, and should not learn to; GLM-5.3's reference trains it all the same.
        chosen = rules.is_thinking_enabled(thinking) and (rules.always_thinks or not thought)
        yield TemplateSpan(
            SpecialToken.THINK_CLOSE, "assistant" if chosen else "template", i, chosen
        )
    else:
        yield TemplateSpan(SpecialToken.THINK_CLOSE, message=i)
    yield said(content.strip())
    for call in message.tool_calls:
        yield from map(said, _call(call))


def _thought(rules: GlmTemplateVariant, message: Message) -> tuple[str | None, str]:
    """Reasoning and content; the first may stand inside the second, before </think>."""
    if message.reasoning is not None or SpecialToken.THINK_CLOSE not in message.content:
        return message.reasoning, message.content
    before, content = message.content.split(SpecialToken.THINK_CLOSE, 1)
    thought = before.split(SpecialToken.THINK_OPEN)[-1]
    return (thought.strip() if rules.opens else thought.strip("\n")), content


def _call(call: ToolCall) -> Iterator[str]:
    yield SpecialToken.TOOL_CALL_OPEN
    yield call.name
    for key, value in call.arguments.items():
        yield SpecialToken.ARG_KEY_OPEN
        yield key
        yield SpecialToken.ARG_KEY_CLOSE
        yield SpecialToken.ARG_VALUE_OPEN
        yield value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        yield SpecialToken.ARG_VALUE_CLOSE
    yield SpecialToken.TOOL_CALL_CLOSE


def _results(
    rules: GlmTemplateVariant, messages: Sequence[Message], first: int, before: Message | None
) -> Iterator[TemplateSpan]:
    """The run of tool results that begins with message `first`."""
    end = first
    while end < len(messages) and messages[end].role == "tool":
        end += 1
    order: Sequence[int] = range(first, end)
    if rules.sorts_results and before is not None:
        asked = [call.id for call in before.tool_calls]
        at = {messages[j].tool_call_id: j for j in order}
        if len(at) == len(order) and set(asked) == set(at):
            order = [at[name] for name in asked]
    for j in order:
        yield TemplateSpan(SpecialToken.TOOL_RESPONSE_OPEN, message=j)
        yield TemplateSpan(messages[j].content, "tool", j)
        yield TemplateSpan(SpecialToken.TOOL_RESPONSE_CLOSE, message=j)


# --- GLM-5 ----------------------------------------------------------------------------------------


class GlmRenderer:
    """GLM-5's template, in one of its versions.

    Nothing that a message or a tool says can spell a marker: text is encoded as plain characters.
    `specials_in_text=True` encodes it as published templates do, where "<|assistant|>" in a tool's
    result is the token; it is there for comparison with them, not for use.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, version: GlmVersion = "5", specials_in_text: bool = False
    ) -> None:
        self.tokenizer, self.version = tokenizer, version
        self.template = glm_chat_template(version)
        self._rules = GLM_TEMPLATE_VARIANTS[version]
        self._specials_in_text = specials_in_text
        tokenizer.special_token_ids.ids_of([token for token in SpecialToken if token in _NEEDED])

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self.tokenizer.special_token_ids.stop_token_ids

    def render_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        thinking: ThinkingKwargs = DEFAULT_THINKING,
        most: int | None = None,
    ) -> RenderedTokens:
        check_message_count(messages, most)
        pieces = [
            *_head(self._rules, tools, thinking),
            *_body(self._rules, messages, thinking),
            *self._opener(thinking),
        ]
        self._refuse_longer(pieces, most)
        return self._encoded(*pieces).restrict_loss_to(())

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
        pieces = [
            *_head(self._rules, tools, thinking),
            *_body(self._rules, messages, thinking),
        ]
        if closed and messages and messages[-1].role == "assistant":
            stop = SpecialToken.OBSERVATION if messages[-1].tool_calls else SpecialToken.USER
            pieces.append(TemplateSpan(stop, "assistant", len(messages) - 1, trained=True))
        self._refuse_longer(pieces, most)
        return self._encoded(*pieces)

    def render_last_reply(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        thinking: ThinkingKwargs = DEFAULT_THINKING,
    ) -> RenderedTokens:
        check_ends_with_assistant(messages)
        whole = self.render_dialogue(messages, tools=tools, thinking=thinking)
        return whole.restrict_loss_to([len(messages) - 1])

    def render_next_turn(
        self,
        past: Sequence[int],
        messages: Sequence[Message],
        *,
        thinking: ThinkingKwargs = DEFAULT_THINKING,
        answering: Message | None = None,
    ) -> RenderedTokens:
        """The stop that was sampled is the role that comes next, so it is not said again.

        What the model said stays, whatever it was. After the wrong role (<|user|>, but tool results
        come) or <|endoftext|> the right role follows. After no stop at all (the length was reached)
        it follows too: a role is what ends a reply. Thoughts that were cut short are closed first,
        as the template would; a call that was cut short stays open, so that it is no call.
        """
        check_no_assistant_messages(messages)
        self._refuse_rewriting(past, messages, thinking)
        pieces = [*_body(self._rules, messages, thinking, answering), *self._opener(thinking)]
        if past and past[-1] == self._id(pieces[0].text):
            pieces = pieces[1:]
        elif is_in_reasoning(self.tokenizer, past):
            pieces = [TemplateSpan(SpecialToken.THINK_CLOSE), *pieces]
        return self._encoded(*pieces)

    def ignored_kwargs(self, thinking: ThinkingKwargs) -> dict[str, str]:
        return ignored_thinking_kwargs(self.version, thinking)

    def _opener(self, thinking: ThinkingKwargs) -> list[TemplateSpan]:
        thinks, opens = self._rules.is_thinking_enabled(thinking), self._rules.opens
        markers = [SpecialToken.THINK_OPEN] if thinks or opens else []
        markers += [] if thinks else [SpecialToken.THINK_CLOSE]
        return [TemplateSpan(SpecialToken.ASSISTANT), *map(TemplateSpan, markers)]

    def _refuse_rewriting(
        self, past: Sequence[int], messages: Sequence[Message], thinking: ThinkingKwargs
    ) -> None:
        if not self._rules.clears_reasoning(thinking) or all(m.role != "user" for m in messages):
            return
        opened, closed = self._id(SpecialToken.THINK_OPEN), self._id(SpecialToken.THINK_CLOSE)
        for token, following in zip(past, [*past[1:], None], strict=True):
            # An empty thought stays as it is where every reply opens with <think>.
            if token == opened and not (self._rules.opens and following == closed):
                raise NotPrefixPreservingError(
                    f"GLM-{self.version} leaves out earlier thoughts when a user message comes:"
                    " say clear_thinking=False, or begin anew with the whole conversation"
                )

    def _id(self, text: str) -> int | None:
        return self.tokenizer.special_token_ids[text] if isinstance(text, SpecialToken) else None

    def _refuse_longer(self, pieces: Sequence[TemplateSpan], most: int | None) -> None:
        if most is not None:
            texts = [piece.text for piece in pieces]
            self.tokenizer.check_max_tokens(texts, most, specials=self._specials_in_text)

    def _encoded(self, *pieces: TemplateSpan) -> RenderedTokens:
        return encode_spans(pieces, self._ids)

    def _ids(self, text: str) -> list[int]:
        if isinstance(text, SpecialToken):
            return [self.tokenizer.special_token_ids[text]]
        return self.tokenizer.encode(text, specials=self._specials_in_text)


_NEEDED = frozenset(
    (
        *(SpecialToken.GMASK, SpecialToken.SOP, *_OPENERS.values(), SpecialToken.ASSISTANT),
        *(SpecialToken.THINK_OPEN, SpecialToken.THINK_CLOSE),
        *(token for token in SpecialToken if "tool" in token or "arg" in token),
    )
)
