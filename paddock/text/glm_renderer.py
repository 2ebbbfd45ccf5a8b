"""Renderer for GLM-5's chat template, span by span, with sources and loss mask.

`glm5.jinja` defines the format. This module produces the same text as spans with a known source;
joined, they equal the Jinja output for every version and setting (tests/text/test_glm_renderer.py).

The model stops by sampling the next role: <|user|> or <|observation|> after a reply is its stop
token, so it belongs to the reply and is in the loss mask. <|assistant|>, the <think> or </think>
of the generation prompt, and all other messages are not.
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


def _head_spans(
    variant: GlmTemplateVariant, tools: Sequence[ToolSpec], thinking: ThinkingKwargs
) -> Iterator[TemplateSpan]:
    yield TemplateSpan(SpecialToken.GMASK)
    yield TemplateSpan(SpecialToken.SOP)
    effort = variant.reasoning_effort(thinking)
    if effort is not None:
        yield TemplateSpan(SpecialToken.SYSTEM)
        yield TemplateSpan(f"Reasoning Effort: {effort.capitalize()}")
    if tools:
        dicts = (tool_to_openai(tool) for tool in tools)
        tool_dicts = (d if variant.wraps_tools else d["function"] for d in dicts)
        lines = "".join(json.dumps(d, ensure_ascii=False) + "\n" for d in tool_dicts)
        yield TemplateSpan(SpecialToken.SYSTEM)
        yield TemplateSpan(_TOOLS_BEFORE + lines + _TOOLS_AFTER)
        yield from map(TemplateSpan, _TOOLS_EXAMPLE_PARTS)


def _message_spans(
    variant: GlmTemplateVariant,
    messages: Sequence[Message],
    thinking: ThinkingKwargs,
    answering: Message | None = None,
) -> Iterator[TemplateSpan]:
    """`answering` is the reply before the first message, if it is already tokenized."""
    last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
    for i, message in enumerate(messages):
        before = messages[i - 1] if i else answering
        marker = _OPENERS.get(message.role, SpecialToken.ASSISTANT)
        opener = TemplateSpan(marker, message=i)
        if i and messages[i - 1].role == "assistant" and message.role in ("user", "tool"):
            opener = TemplateSpan(marker, "assistant", i - 1, loss_mask=True)
        match message.role:
            case "assistant":
                yield opener
                yield from _reply_spans(variant, message, i, thinking, newest=i > last_user)
            case "tool":
                if before is None or before.role != "tool":
                    yield opener
                    yield from _tool_result_spans(variant, messages, i, before)
            case role:
                yield opener
                yield TemplateSpan(message.content, role, i)


def _reply_spans(
    variant: GlmTemplateVariant, message: Message, i: int, thinking: ThinkingKwargs, *, newest: bool
) -> Iterator[TemplateSpan]:
    def trained_span(text: str) -> TemplateSpan:
        return TemplateSpan(text, "assistant", i, loss_mask=True)

    reasoning, content = _split_reasoning(variant, message)
    keep_reasoning = newest or not variant.clears_reasoning(thinking)
    if reasoning is not None and (variant.opens or reasoning) and keep_reasoning:
        yield TemplateSpan(SpecialToken.THINK_OPEN, message=i)
        yield trained_span(reasoning if variant.opens else reasoning.strip())
        yield trained_span(SpecialToken.THINK_CLOSE)
    elif variant.opens or (
        variant.opens_newest and newest and variant.is_thinking_enabled(thinking)
    ):
        yield TemplateSpan(SpecialToken.THINK_OPEN, message=i)
        # An empty thinking block was sampled by a model with thinking enabled. Where reasoning was
        # dropped it was not, so it is not trained; GLM-5.3's reference trains it all the same.
        chosen = variant.is_thinking_enabled(thinking) and (variant.always_thinks or not reasoning)
        yield TemplateSpan(
            SpecialToken.THINK_CLOSE, "assistant" if chosen else "template", i, chosen
        )
    else:
        yield TemplateSpan(SpecialToken.THINK_CLOSE, message=i)
    yield trained_span(content.strip())
    for call in message.tool_calls:
        yield from map(trained_span, _call_parts(call))


def _split_reasoning(variant: GlmTemplateVariant, message: Message) -> tuple[str | None, str]:
    """Reasoning and content; content may contain the reasoning before </think>."""
    if message.reasoning is not None or SpecialToken.THINK_CLOSE not in message.content:
        return message.reasoning, message.content
    before, content = message.content.split(SpecialToken.THINK_CLOSE, 1)
    reasoning = before.split(SpecialToken.THINK_OPEN)[-1]
    return (reasoning.strip() if variant.opens else reasoning.strip("\n")), content


def _call_parts(call: ToolCall) -> Iterator[str]:
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


def _tool_result_spans(
    variant: GlmTemplateVariant, messages: Sequence[Message], first: int, before: Message | None
) -> Iterator[TemplateSpan]:
    """The consecutive tool results from message `first` on."""
    end = first
    while end < len(messages) and messages[end].role == "tool":
        end += 1
    order: Sequence[int] = range(first, end)
    if variant.sorts_results and before is not None:
        call_ids = [call.id for call in before.tool_calls]
        at = {messages[j].tool_call_id: j for j in order}
        if len(at) == len(order) and set(call_ids) == set(at):
            order = [at[name] for name in call_ids]
    for j in order:
        yield TemplateSpan(SpecialToken.TOOL_RESPONSE_OPEN, message=j)
        yield TemplateSpan(messages[j].content, "tool", j)
        yield TemplateSpan(SpecialToken.TOOL_RESPONSE_CLOSE, message=j)


# --- GLM-5 ----------------------------------------------------------------------------------------


class GlmRenderer:
    """Renders with GLM-5's template, in one of its versions.

    Text of messages and tools never becomes a special token. `specials_in_text=True` encodes it as
    the published templates do, where "<|assistant|>" in a tool result is the token; it exists for
    comparison only.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, version: GlmVersion = "5", specials_in_text: bool = False
    ) -> None:
        self.tokenizer, self.version = tokenizer, version
        self.template = glm_chat_template(version)
        self._variant = GLM_TEMPLATE_VARIANTS[version]
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
        max_tokens: int | None = None,
    ) -> RenderedTokens:
        check_message_count(messages, max_tokens)
        spans = [
            *_head_spans(self._variant, tools, thinking),
            *_message_spans(self._variant, messages, thinking),
            *self._generation_prompt(thinking),
        ]
        self._check_max_tokens(spans, max_tokens)
        return self._encode(*spans).restrict_loss_to(())

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
        spans = [
            *_head_spans(self._variant, tools, thinking),
            *_message_spans(self._variant, messages, thinking),
        ]
        if closed and messages and messages[-1].role == "assistant":
            stop = SpecialToken.OBSERVATION if messages[-1].tool_calls else SpecialToken.USER
            spans.append(TemplateSpan(stop, "assistant", len(messages) - 1, loss_mask=True))
        self._check_max_tokens(spans, max_tokens)
        return self._encode(*spans)

    def render_last_reply(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        thinking: ThinkingKwargs = DEFAULT_THINKING,
    ) -> RenderedTokens:
        check_ends_with_assistant(messages)
        dialogue = self.render_dialogue(messages, tools=tools, thinking=thinking)
        return dialogue.restrict_loss_to([len(messages) - 1])

    def render_next_turn(
        self,
        past: Sequence[int],
        messages: Sequence[Message],
        *,
        thinking: ThinkingKwargs = DEFAULT_THINKING,
        answering: Message | None = None,
    ) -> RenderedTokens:
        """The sampled stop token is the next role, so it is not repeated.

        Sampled tokens are never changed. After the wrong role (<|user|> before tool results),
        <|endoftext|>, or no stop token (finish reason length), the right role follows. Truncated
        reasoning is closed first, as the template does; a truncated call stays open, so that it is
        not parsed as a call.
        """
        check_no_assistant_messages(messages)
        self._check_prefix_preserved(past, messages, thinking)
        spans = [
            *_message_spans(self._variant, messages, thinking, answering),
            *self._generation_prompt(thinking),
        ]
        if past and past[-1] == self._id(spans[0].text):
            spans = spans[1:]
        elif is_in_reasoning(self.tokenizer, past):
            spans = [TemplateSpan(SpecialToken.THINK_CLOSE), *spans]
        return self._encode(*spans)

    def ignored_kwargs(self, thinking: ThinkingKwargs) -> dict[str, str]:
        return ignored_thinking_kwargs(self.version, thinking)

    def _generation_prompt(self, thinking: ThinkingKwargs) -> list[TemplateSpan]:
        thinking_enabled, opens = self._variant.is_thinking_enabled(thinking), self._variant.opens
        markers = [SpecialToken.THINK_OPEN] if thinking_enabled or opens else []
        markers += [] if thinking_enabled else [SpecialToken.THINK_CLOSE]
        return [TemplateSpan(SpecialToken.ASSISTANT), *map(TemplateSpan, markers)]

    def _check_prefix_preserved(
        self, past: Sequence[int], messages: Sequence[Message], thinking: ThinkingKwargs
    ) -> None:
        if not self._variant.clears_reasoning(thinking) or all(m.role != "user" for m in messages):
            return
        open_id, closed = self._id(SpecialToken.THINK_OPEN), self._id(SpecialToken.THINK_CLOSE)
        for token, following in zip(past, [*past[1:], None], strict=True):
            # Empty reasoning is kept where every reply opens with <think>.
            if token == open_id and not (self._variant.opens and following == closed):
                raise NotPrefixPreservingError(
                    f"GLM-{self.version} drops earlier reasoning when a user message follows: set "
                    "clear_thinking=False, or render the whole conversation again"
                )

    def _id(self, text: str) -> int | None:
        return self.tokenizer.special_token_ids[text] if isinstance(text, SpecialToken) else None

    def _check_max_tokens(self, spans: Sequence[TemplateSpan], max_tokens: int | None) -> None:
        if max_tokens is not None:
            texts = [span.text for span in spans]
            self.tokenizer.check_max_tokens(texts, max_tokens, specials=self._specials_in_text)

    def _encode(self, *spans: TemplateSpan) -> RenderedTokens:
        return encode_spans(spans, self._ids)

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
