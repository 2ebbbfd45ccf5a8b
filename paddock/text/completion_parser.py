"""Incremental parser of completion tokens into reasoning, content and tool calls.

Special tokens are recognised by id, never by text, so a completion may quote them.

- The prompt decides the initial state: inside <think>, after </think>, or inside a call.
- <tool_call> ends reasoning. </think> in content and <think> in reasoning are ignored.
- A call is <tool_call>NAME(<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>)*</tool_call>. Only
  </arg_value> ends a value, which is typed by the tool's schema (`coerce_argument`). A call may
  also be one JSON object {"name": ..., "arguments": ...}, as in Qwen.
- Calls of unknown tools, malformed and unfinished calls are discarded: the text stays as content,
  and a note gives the reason.
- If the model stops inside reasoning, the open reasoning is content; if it is truncated, it is not.

Any sequence of ids is accepted; ids outside the vocabulary are ignored.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from paddock.records import FinishReason, Message, ToolCall, ToolSpec
from paddock.text.parse_events import (
    ContentDelta,
    ParsedCompletion,
    ParseEvent,
    ReasoningDelta,
    ReasoningRetraction,
    ToolCallArgumentsDelta,
    ToolCallDiscard,
    ToolCallEnd,
    ToolCallStart,
)
from paddock.text.special_tokens import SpecialToken
from paddock.text.tokenizer import IncrementalDetokenizer, Tokenizer
from paddock.text.tool_arguments import (
    allowed_json_types,
    coerce_argument,
    parse_arguments,
    parse_json_value,
)

_MARKERS = (
    *(SpecialToken.THINK_OPEN, SpecialToken.THINK_CLOSE),
    *(SpecialToken.TOOL_CALL_OPEN, SpecialToken.TOOL_CALL_CLOSE),
    *(SpecialToken.ARG_KEY_OPEN, SpecialToken.ARG_KEY_CLOSE),
    *(SpecialToken.ARG_VALUE_OPEN, SpecialToken.ARG_VALUE_CLOSE),
)

# --- state machine --------------------------------------------------------------------------------


class _State(Enum):
    CONTENT = auto()
    REASONING = auto()
    NAME = auto()  # after <tool_call>
    BETWEEN = auto()  # before the next <arg_key> or </tool_call>
    KEY = auto()
    AFTER_KEY = auto()
    VALUE = auto()


@dataclass(slots=True)
class _Call:
    """The call being parsed."""

    raw: list[str] = field(default_factory=list)  # all text of it: content if the call is discarded
    name: str = ""
    key: str = ""
    value: list[str] = field(default_factory=list)
    streamed: bool = False  # the value is a string, emitted as it arrives
    started: bool = False  # the name is complete
    stray_text_noted: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


class CompletionParser:
    """Parses a completion as it is sampled. The result does not depend on how tokens are chunked.

    `tools` are the tools that may be called: None accepts any name, () none. `prompt` are the
    tokens before the completion; its last tokens decide the initial state. `call_id` returns the id
    of the n-th call.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        tools: Sequence[ToolSpec] | None = None,
        prompt: Sequence[int] = (),
        call_id: Callable[[int], str] = "call_{}".format,
    ) -> None:
        self._tokenizer, self._call_id = tokenizer, call_id
        self._tools = None if tools is None else {tool.name: tool for tool in tools}
        specials = tokenizer.special_token_ids
        self._markers = {specials[token]: token for token in _MARKERS if token in specials}
        self._text = IncrementalDetokenizer(tokenizer)
        self._events: list[ParseEvent] = []
        self._notes: list[str] = []
        self._reasoning: list[str] = []
        self._open_text: list[str] = []  # since the last <think>
        self._open_tokens = self._reasoning_tokens = 0
        self._content: list[str] = []
        self._after_call = False  # only whitespace has followed a call so far
        self._blank = ""  # that whitespace, until it is known whether more follows
        self._calls: list[ToolCall] = []
        self._call = _Call()
        self._state = _State.CONTENT
        self._enter_prompt_state(prompt)

    def feed(self, token_ids: Iterable[int]) -> list[ParseEvent]:
        self._feed_tokens(token_ids)
        events, self._events = self._events, []
        return _merge_deltas(events)

    def finish(self, reason: FinishReason) -> list[ParseEvent]:
        """The remaining events once no token follows; `reason` is the finish reason."""
        self._add_text(self._text.flush())
        if self._state not in (_State.CONTENT, _State.REASONING):
            self._discard_call("unfinished tool call")
        if self._state is _State.REASONING and reason == "stop" and self._open_text:
            self._notes.append("no </think>: reasoning treated as content")
            text, self._open_text, self._open_tokens = (
                "".join(self._open_text),
                [],
                0,
            )
            self._events.append(ReasoningRetraction(text))
            self._state = _State.CONTENT
            self._add_text(text)
        self._close_reasoning()
        return self.feed(())

    @property
    def result(self) -> ParsedCompletion:
        """The result so far; complete after `finish`."""
        return ParsedCompletion(
            message=Message(
                role="assistant",
                content="".join(self._content),
                reasoning="".join([*self._reasoning, *self._open_text]) or None,
                tool_calls=tuple(self._calls),
            ),
            reasoning_tokens=self._reasoning_tokens + self._open_tokens,
            notes=tuple(self._notes),
        )

    def _enter_prompt_state(self, prompt: Sequence[int]) -> None:
        at = _last_marker(self._tokenizer, prompt)
        marker = None if at is None else self._markers.get(prompt[at])
        if marker is SpecialToken.THINK_OPEN:
            self._state = _State.REASONING
        elif marker is SpecialToken.TOOL_CALL_OPEN:
            self._feed_tokens(prompt[at:])

    def _feed_tokens(self, token_ids: Iterable[int]) -> None:
        """Special tokens one by one, runs of text tokens at once."""
        vocab, is_special = self._tokenizer.vocab_size, self._tokenizer.is_special
        text: list[int] = []
        for token_id in token_ids:
            marker = self._markers.get(token_id)
            if marker is not None:
                self._feed_text(text)
                text = []
                if self._state is _State.REASONING and marker is not SpecialToken.TOOL_CALL_OPEN:
                    self._open_tokens += 1
                self._add_text(self._text.flush())
                self._handle_marker(marker)
            elif 0 <= token_id < vocab and not is_special(token_id):
                text.append(token_id)
        self._feed_text(text)

    def _feed_text(self, token_ids: Sequence[int]) -> None:
        if self._state is _State.REASONING:
            self._open_tokens += len(token_ids)
        if token_ids:
            self._add_text(self._text.push_all(token_ids))

    def _add_text(self, text: str) -> None:
        """Handle text in the current state."""
        if not text:
            return
        if self._state is _State.CONTENT:
            self._add_content(text)
        elif self._state is _State.REASONING:
            self._open_text.append(text)
            self._events.append(ReasoningDelta(text))
        else:
            self._call.raw.append(text)
            self._add_call_text(self._call, text)

    def _add_call_text(self, call: _Call, text: str) -> None:
        match self._state:
            case _State.NAME:
                call.name += text
            case _State.KEY:
                call.key += text
            case _State.VALUE:
                call.value.append(text)
                if call.streamed:
                    self._emit_arguments(_to_json(text)[1:-1])
            case _ if text.strip() and not call.stray_text_noted:
                call.stray_text_noted = True
                self._notes.append(
                    f"unexpected text between arguments of a call of {call.name!r:.80}"
                )

    def _add_content(self, text: str) -> None:
        if self._after_call and not text.strip():
            self._blank += text
            return
        text, self._blank, self._after_call = self._blank + text, "", False
        self._content.append(text)
        self._events.append(ContentDelta(text))

    def _handle_marker(self, marker: SpecialToken) -> None:
        """Handle a special token in the current state."""
        transition = _TRANSITIONS.get((self._state, marker))
        if transition is not None:
            self._call.raw.append(marker)
            transition(self)
        elif self._state is _State.VALUE:
            self._add_text(marker.value)
        elif self._state in (_State.CONTENT, _State.REASONING):
            if marker not in (SpecialToken.THINK_OPEN, SpecialToken.THINK_CLOSE):
                self._add_text(marker.value)
        else:
            self._discard_call(f"tool call with misplaced {marker.value}")
            self._handle_marker(marker)

    # --- reasoning

    def _open_reasoning(self) -> None:
        self._state = _State.REASONING

    def _close_reasoning(self) -> None:
        self._reasoning += self._open_text
        self._reasoning_tokens += self._open_tokens
        self._open_text, self._open_tokens = [], 0
        if self._state is _State.REASONING:
            self._state = _State.CONTENT

    # --- calls

    def _open_call(self) -> None:
        self._close_reasoning()
        self._blank = ""
        self._call = _Call(raw=[SpecialToken.TOOL_CALL_OPEN])
        self._state = _State.NAME

    def _start_call(self) -> bool:
        """The name is complete; returns whether the tool is known."""
        call = self._call
        call.name = call.name.strip()
        if not call.name or (self._tools is not None and call.name not in self._tools):
            self._discard_call(f"tool call of unknown tool {call.name!r:.80}")
            return False
        call.started = True
        index = len(self._calls)
        self._events.append(ToolCallStart(index, self._call_id(index), call.name))
        return True

    def _open_key(self) -> None:
        if self._call.started or self._start_call():
            self._call.key = ""
            self._state = _State.KEY

    def _close_key(self) -> None:
        self._call.key = self._call.key.strip()
        self._state = _State.AFTER_KEY

    def _open_value(self) -> None:
        call = self._call
        call.value, call.streamed = [], self._argument_types() == {"string"}
        before = ", " if call.arguments else "{"
        self._emit_arguments(f"{before}{_to_json(call.key)}: " + '"' * call.streamed)
        self._state = _State.VALUE

    def _close_value(self) -> None:
        call = self._call
        value, fits = coerce_argument("".join(call.value), self._argument_types())
        if not fits:
            kinds = " or ".join(sorted(self._argument_types()))
            self._notes.append(f"argument {call.key!r:.80} of {call.name!r:.80} is not {kinds}")
        self._emit_arguments('"' if call.streamed else _to_json(value))
        call.arguments[call.key] = value
        self._state = _State.BETWEEN

    def _close_call(self) -> None:
        call = self._call
        if not call.started:
            arguments = self._json_call()
            if not self._start_call():
                return
            call.arguments = arguments
            self._emit_arguments(_to_json(arguments)[:-1])
        index = len(self._calls)
        self._emit_arguments("}")
        self._events.append(ToolCallEnd(index))
        self._calls.append(
            ToolCall(id=self._call_id(index), name=call.name, arguments=call.arguments)
        )
        self._after_call = True
        self._state = _State.CONTENT

    def _json_call(self) -> dict[str, Any]:
        """The arguments of a call without argument tokens: none, or those of a JSON object with the
        name."""
        try:
            found = parse_json_value(self._call.name)
        except ValueError:
            return {}
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return {}
        self._call.name = found["name"]
        return dict(parse_arguments(found.get("arguments")))

    def _discard_call(self, note: str) -> None:
        self._notes.append(note)
        if self._call.started:
            self._events.append(ToolCallDiscard(len(self._calls)))
        raw, self._call = "".join(self._call.raw), _Call()
        self._state = _State.CONTENT
        self._add_text(raw)

    def _argument_types(self) -> frozenset[str]:
        tool = (self._tools or {}).get(self._call.name)
        return frozenset() if tool is None else allowed_json_types(tool.parameters, self._call.key)

    def _emit_arguments(self, text: str) -> None:
        self._events.append(ToolCallArgumentsDelta(len(self._calls), text))


_TRANSITIONS: dict[tuple[_State, SpecialToken], Callable[[CompletionParser], object]] = {
    (_State.CONTENT, SpecialToken.THINK_OPEN): CompletionParser._open_reasoning,
    (_State.REASONING, SpecialToken.THINK_CLOSE): CompletionParser._close_reasoning,
    (_State.CONTENT, SpecialToken.TOOL_CALL_OPEN): CompletionParser._open_call,
    (_State.REASONING, SpecialToken.TOOL_CALL_OPEN): CompletionParser._open_call,
    (_State.NAME, SpecialToken.ARG_KEY_OPEN): CompletionParser._open_key,
    (_State.NAME, SpecialToken.TOOL_CALL_CLOSE): CompletionParser._close_call,
    (_State.BETWEEN, SpecialToken.ARG_KEY_OPEN): CompletionParser._open_key,
    (_State.BETWEEN, SpecialToken.TOOL_CALL_CLOSE): CompletionParser._close_call,
    (_State.KEY, SpecialToken.ARG_KEY_CLOSE): CompletionParser._close_key,
    (_State.AFTER_KEY, SpecialToken.ARG_VALUE_OPEN): CompletionParser._open_value,
    (_State.VALUE, SpecialToken.ARG_VALUE_CLOSE): CompletionParser._close_value,
}


def parse_completion(
    tokenizer: Tokenizer,
    token_ids: Iterable[int],
    *,
    finish: FinishReason,
    tools: Sequence[ToolSpec] | None = None,
    prompt: Sequence[int] = (),
    call_id: Callable[[int], str] = "call_{}".format,
) -> ParsedCompletion:
    """Parse a complete completion; see CompletionParser."""
    parser = CompletionParser(tokenizer, tools=tools, prompt=prompt, call_id=call_id)
    parser.feed(token_ids)
    parser.finish(finish)
    return parser.result


def is_in_reasoning(tokenizer: Tokenizer, token_ids: Sequence[int]) -> bool:
    """Whether the next token after these belongs to reasoning."""
    at = _last_marker(tokenizer, token_ids)
    specials = tokenizer.special_token_ids
    return at is not None and token_ids[at] == specials.ids.get(SpecialToken.THINK_OPEN)


def _last_marker(tokenizer: Tokenizer, token_ids: Sequence[int]) -> int | None:
    """The index of the last token that opens or closes reasoning or a call, or is special."""
    specials = tokenizer.special_token_ids
    markers = {specials[token] for token in _MARKERS[:4] if token in specials}
    for at in range(len(token_ids) - 1, -1, -1):
        if token_ids[at] in markers or tokenizer.is_special(token_ids[at]):
            return at
    return None


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _merge_deltas(events: Sequence[ParseEvent]) -> list[ParseEvent]:
    """Merge adjacent deltas of the same kind."""
    found: list[ParseEvent] = []
    for event in events:
        match (found[-1] if found else None), event:
            case (ReasoningDelta(text), ReasoningDelta(more)):
                found[-1] = ReasoningDelta(text + more)
            case (ContentDelta(text), ContentDelta(more)):
                found[-1] = ContentDelta(text + more)
            case (ToolCallArgumentsDelta(i, text), ToolCallArgumentsDelta(j, more)) if i == j:
                found[-1] = ToolCallArgumentsDelta(i, text + more)
            case _:
                found.append(event)
    return found
