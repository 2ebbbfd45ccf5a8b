"""A reply, token by token: reasoning, content and tool calls.

Markers are recognised by their token, never by their spelling, so a reply may quote them.

- The reply begins where the prompt ended: inside <think>, after </think>, or inside a call.
- <tool_call> ends reasoning. </think> in content and <think> in reasoning say nothing.
- A call is <tool_call>NAME(<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>)*</tool_call>. Only
  </arg_value> ends a value, which is typed by the tool's schema (`arguments.typed`). A call may
  also be one JSON object {"name": ..., "arguments": ...}, as Qwen's are.
- A call of an unknown tool, one that breaks these rules and one that never ends are no calls: what
  was said stays as content, and a note says why.
- A model that stops while it thinks has answered: that is content. One that was cut short has not.

Any sequence of ids is a reply; none raises. Ids outside the vocabulary say nothing.
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
    *(
        SpecialToken.THINK_OPEN,
        SpecialToken.THINK_CLOSE,
        SpecialToken.TOOL_CALL_OPEN,
        SpecialToken.TOOL_CALL_CLOSE,
    ),
    *(SpecialToken.ARG_KEY_OPEN, SpecialToken.ARG_KEY_CLOSE),
    *(SpecialToken.ARG_VALUE_OPEN, SpecialToken.ARG_VALUE_CLOSE),
)

# --- the machine ----------------------------------------------------------------------------------


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
    """A call as far as it has been read."""

    said: list[str] = field(default_factory=list)  # all of it: content if it is no call
    name: str = ""
    key: str = ""
    value: list[str] = field(default_factory=list)
    streams: bool = False  # the value is text, passed on as it comes
    started: bool = False  # the name is known
    strays: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


class CompletionParser:
    """Reads a reply as it is sampled. However tokens are cut into feeds, the result is the same.

    `tools` are those the reply may call: None if any name will do, () if there are none. `prompt`
    is what the reply follows; its last tokens decide what the first ones mean. `call_id` names the
    n-th call.
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
        self._thought: list[str] = []  # since the last <think>
        self._thought_tokens = self._reasoning_tokens = 0
        self._content: list[str] = []
        self._after_call = False  # and nothing but blanks has followed it yet
        self._blank = ""  # those blanks, until it is known whether more follows
        self._calls: list[ToolCall] = []
        self._call = _Call()
        self._state = _State.CONTENT
        self._begin(prompt)

    def feed(self, token_ids: Iterable[int]) -> list[ParseEvent]:
        self._read(token_ids)
        events, self._events = self._events, []
        return _joined(events)

    def finish(self, reason: FinishReason) -> list[ParseEvent]:
        """What is still to be said when no token follows; `reason` is why."""
        self._said(self._text.flush())
        if self._state not in (_State.CONTENT, _State.REASONING):
            self._drop_call("a call that does not end")
        if self._state is _State.REASONING and reason == "stop" and self._thought:
            self._notes.append("no </think>: what was thought is the answer")
            text, self._thought, self._thought_tokens = "".join(self._thought), [], 0
            self._events.append(ReasoningRetraction(text))
            self._state = _State.CONTENT
            self._said(text)
        self._close_thought()
        return self.feed(())

    @property
    def result(self) -> ParsedCompletion:
        """The reply so far; whole after `finish`."""
        return ParsedCompletion(
            message=Message(
                role="assistant",
                content="".join(self._content),
                reasoning="".join([*self._reasoning, *self._thought]) or None,
                tool_calls=tuple(self._calls),
            ),
            reasoning_tokens=self._reasoning_tokens + self._thought_tokens,
            notes=tuple(self._notes),
        )

    def _begin(self, prompt: Sequence[int]) -> None:
        """Enter the state that the prompt ends in."""
        at = _last_marker(self._tokenizer, prompt)
        marker = None if at is None else self._markers.get(prompt[at])
        if marker is SpecialToken.THINK_OPEN:
            self._state = _State.REASONING
        elif marker is SpecialToken.TOOL_CALL_OPEN:
            self._read(prompt[at:])

    def _read(self, token_ids: Iterable[int]) -> None:
        """Markers one by one, the tokens between two of them all at once."""
        vocab, silent = self._tokenizer.vocab_size, self._tokenizer.is_special
        text: list[int] = []
        for token_id in token_ids:
            marker = self._markers.get(token_id)
            if marker is not None:
                self._read_text(text)
                text = []
                if self._state is _State.REASONING and marker is not SpecialToken.TOOL_CALL_OPEN:
                    self._thought_tokens += 1
                self._said(self._text.flush())
                self._marked(marker)
            elif 0 <= token_id < vocab and not silent(token_id):
                text.append(token_id)
        self._read_text(text)

    def _read_text(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            return
        if self._state is _State.REASONING:
            self._thought_tokens += len(token_ids)
        self._said(self._text.push_all(token_ids))

    def _said(self, text: str) -> None:
        """Text in the present state."""
        if not text:
            return
        if self._state is _State.CONTENT:
            self._say(text)
        elif self._state is _State.REASONING:
            self._thought.append(text)
            self._events.append(ReasoningDelta(text))
        else:
            self._call.said.append(text)
            self._said_in_call(self._call, text)

    def _said_in_call(self, call: _Call, text: str) -> None:
        match self._state:
            case _State.NAME:
                call.name += text
            case _State.KEY:
                call.key += text
            case _State.VALUE:
                call.value.append(text)
                if call.streams:
                    self._pass_on(_quoted(text)[1:-1])
            case _ if text.strip() and not call.strays:
                call.strays = True
                self._notes.append(f"text between the parts of a call of {call.name!r:.80}")

    def _say(self, text: str) -> None:
        if self._after_call and not text.strip():
            self._blank += text
            return
        text, self._blank, self._after_call = self._blank + text, "", False
        self._content.append(text)
        self._events.append(ContentDelta(text))

    def _marked(self, marker: SpecialToken) -> None:
        """A marker in the present state."""
        step = _STEPS.get((self._state, marker))
        if step is not None:
            self._call.said.append(marker)
            step(self)
        elif self._state is _State.VALUE:
            self._said(marker.value)
        elif self._state in (_State.CONTENT, _State.REASONING):
            if marker not in (SpecialToken.THINK_OPEN, SpecialToken.THINK_CLOSE):
                self._said(marker.value)
        else:
            self._drop_call(f"a call with {marker.value} in the wrong place")
            self._marked(marker)

    # --- thinking

    def _open_thought(self) -> None:
        self._state = _State.REASONING

    def _close_thought(self) -> None:
        self._reasoning += self._thought
        self._reasoning_tokens += self._thought_tokens
        self._thought, self._thought_tokens = [], 0
        if self._state is _State.REASONING:
            self._state = _State.CONTENT

    # --- calls

    def _open_call(self) -> None:
        self._close_thought()
        self._blank = ""
        self._call = _Call(said=[SpecialToken.TOOL_CALL_OPEN])
        self._state = _State.NAME

    def _start_call(self) -> bool:
        """The name is complete: whether it is one."""
        call = self._call
        call.name = call.name.strip()
        if not call.name or (self._tools is not None and call.name not in self._tools):
            self._drop_call(f"a call of an unknown tool {call.name!r:.80}")
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
        call.value, call.streams = [], self._kinds() == {"string"}
        before = ", " if call.arguments else "{"
        self._pass_on(f"{before}{_quoted(call.key)}: " + '"' * call.streams)
        self._state = _State.VALUE

    def _close_value(self) -> None:
        call = self._call
        value, fits = coerce_argument("".join(call.value), self._kinds())
        if not fits:
            kinds = " or ".join(sorted(self._kinds()))
            self._notes.append(f"argument {call.key!r:.80} of {call.name!r:.80} is not {kinds}")
        self._pass_on('"' if call.streams else _quoted(value))
        call.arguments[call.key] = value
        self._state = _State.BETWEEN

    def _close_call(self) -> None:
        call = self._call
        if not call.started:
            given = self._json_call()
            if not self._start_call():
                return
            call.arguments = given
            self._pass_on(_quoted(given)[:-1])
        index = len(self._calls)
        self._pass_on("}")
        self._events.append(ToolCallEnd(index))
        self._calls.append(
            ToolCall(id=self._call_id(index), name=call.name, arguments=call.arguments)
        )
        self._after_call = True
        self._state = _State.CONTENT

    def _json_call(self) -> dict[str, Any]:
        """The arguments of a call without parts, which are none or stand in a JSON object together
        with the name."""
        try:
            found = parse_json_value(self._call.name)
        except ValueError:
            return {}
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return {}
        self._call.name = found["name"]
        return dict(parse_arguments(found.get("arguments")))

    def _drop_call(self, why: str) -> None:
        self._notes.append(why)
        if self._call.started:
            self._events.append(ToolCallDiscard(len(self._calls)))
        said, self._call = "".join(self._call.said), _Call()
        self._state = _State.CONTENT
        self._said(said)

    def _kinds(self) -> frozenset[str]:
        tool = (self._tools or {}).get(self._call.name)
        return frozenset() if tool is None else allowed_json_types(tool.parameters, self._call.key)

    def _pass_on(self, text: str) -> None:
        self._events.append(ToolCallArgumentsDelta(len(self._calls), text))


_STEPS: dict[tuple[_State, SpecialToken], Callable[[CompletionParser], object]] = {
    (_State.CONTENT, SpecialToken.THINK_OPEN): CompletionParser._open_thought,
    (_State.REASONING, SpecialToken.THINK_CLOSE): CompletionParser._close_thought,
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
    """A reply that is already whole; see Parser."""
    parser = CompletionParser(tokenizer, tools=tools, prompt=prompt, call_id=call_id)
    parser.feed(token_ids)
    parser.finish(finish)
    return parser.result


def is_in_reasoning(tokenizer: Tokenizer, token_ids: Sequence[int]) -> bool:
    """Whether what follows these tokens is reasoning."""
    at = _last_marker(tokenizer, token_ids)
    specials = tokenizer.special_token_ids
    return at is not None and token_ids[at] == specials.ids.get(SpecialToken.THINK_OPEN)


def _last_marker(tokenizer: Tokenizer, token_ids: Sequence[int]) -> int | None:
    """Where the last token stands that opens or closes thinking or a call, or is silent."""
    specials = tokenizer.special_token_ids
    telling = {specials[token] for token in _MARKERS[:4] if token in specials}
    for at in range(len(token_ids) - 1, -1, -1):
        if token_ids[at] in telling or tokenizer.is_special(token_ids[at]):
            return at
    return None


def _quoted(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _joined(events: Sequence[ParseEvent]) -> list[ParseEvent]:
    """Neighbours that go on with the same text become one."""
    found: list[ParseEvent] = []
    for event in events:
        match (found[-1] if found else None), event:
            case (ReasoningDelta(text), ReasoningDelta(more)):
                found[-1] = ReasoningDelta(text + more)
            case (ContentDelta(text), ContentDelta(more)):
                found[-1] = ContentDelta(text + more)
            case (ToolCallArgumentsDelta(index, text), ToolCallArgumentsDelta(same, more)) if (
                index == same
            ):
                found[-1] = ToolCallArgumentsDelta(index, text + more)
            case _:
                found.append(event)
    return found
