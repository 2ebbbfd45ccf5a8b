"""Incremental parser from engine output deltas to reasoning, content and tool calls.

`OutputDelta` and `RequestOutput` are structural types: this package does not import engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from paddock.records import Message, OutputDelta, ToolSpec
from paddock.text import CompletionParser, Tokenizer, parse_events

TextDeltaType = type[parse_events.ReasoningDelta] | type[parse_events.ContentDelta]


class DeltaParser:
    """Parses one completion delta by delta. A stop string that ended it is removed.

    With `whole_calls` the events of a tool call are held back until the call is complete, so that a
    streamed completion never differs from the final message.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        tools: Sequence[ToolSpec],
        prompt: Sequence[int],
        stops: Sequence[str],
        call_id: Callable[[int], str],
        whole_calls: bool = False,
    ) -> None:
        self._parser = CompletionParser(tokenizer, tools=tools, prompt=prompt, call_id=call_id)
        self._held = HeldBackText(stops)
        self._matched: str | None = None
        self._whole_calls, self._call = whole_calls, list[parse_events.ParseEvent]()
        self._reasoning: list[str] = []  # as streamed

    def feed(self, delta: OutputDelta) -> list[parse_events.ParseEvent]:
        """New events; with the last delta also everything that was held back."""
        events = self._parser.feed(delta.token_ids)
        if delta.output is None:
            found = self._held.feed(events)
        else:
            events += self._parser.finish(delta.output.completion.finish)
            self._matched = (
                delta.output.matched_stop if isinstance(delta.output.matched_stop, str) else None
            )
            found = self._held.finish(events, self._matched)
        self._reasoning += [
            event.text for event in found if isinstance(event, parse_events.ReasoningDelta)
        ]
        return (
            [out for event in found for out in self._buffer_tool_call(event)]
            if self._whole_calls
            else found
        )

    def _buffer_tool_call(self, event: parse_events.ParseEvent) -> list[parse_events.ParseEvent]:
        """Hold back the events of an unfinished tool call; emit all of them when it ends."""
        match event:
            case parse_events.ToolCallStart() | parse_events.ToolCallArgumentsDelta():
                self._call.append(event)
                return []
            case parse_events.ToolCallEnd():
                call, self._call = self._call, []
                return [*call, event]
            case parse_events.ToolCallDiscard():
                self._call = []
                return []
        return [event]

    @property
    def streamed_message(self) -> Message:
        """The message as a streaming client saw it: text that turned out to be content may have
        been streamed as reasoning first."""
        return replace(self.message, reasoning="".join(self._reasoning) or None)

    @property
    def message(self) -> Message:
        """The message so far; complete after the last delta."""
        message = self._parser.result.message
        if self._matched is None:
            return message
        content, reasoning = message.content, message.reasoning
        if self._matched in content:
            content = truncate_at_stop(content, self._matched)
        elif reasoning is not None:
            reasoning = truncate_at_stop(reasoning, self._matched) or None
        return Message(
            role="assistant", content=content, reasoning=reasoning, tool_calls=message.tool_calls
        )

    @property
    def reasoning_tokens(self) -> int:
        return self._parser.result.reasoning_tokens

    @property
    def notes(self) -> tuple[str, ...]:
        """Parse problems of the completion."""
        return self._parser.result.notes


class HeldBackText:
    """Emits text as soon as it cannot be the beginning of a stop string.

    >>> held = HeldBackText(["END"])
    >>> [held.feed([parse_events.ContentDelta(text)]) for text in ("so E", "N", "x")]
    [[ContentDelta(text='so ')], [], [ContentDelta(text='ENx')]]
    >>> held.finish([parse_events.ContentDelta(" END.")], "END")
    [ContentDelta(text=' ')]
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._kind: TextDeltaType = parse_events.ContentDelta
        self._text = ""

    def feed(self, events: Sequence[parse_events.ParseEvent]) -> list[parse_events.ParseEvent]:
        if not self._stops:
            return list(events)
        found: list[parse_events.ParseEvent] = []
        for event in events:
            if isinstance(event, parse_events.ReasoningDelta | parse_events.ContentDelta):
                self._switch_kind(found, type(event))
                self._text += event.text
                self._emit(found, len(self._text) - self._stop_prefix_length())
            else:
                self._switch_kind(found, None)
                found.append(event)
        return found

    def finish(
        self, events: Sequence[parse_events.ParseEvent], matched: str | None
    ) -> list[parse_events.ParseEvent]:
        """All remaining events, up to the stop string that ended the completion."""
        if not self._stops:
            return list(events)
        found: list[parse_events.ParseEvent] = []
        for event in events:
            if isinstance(event, parse_events.ReasoningDelta | parse_events.ContentDelta):
                self._switch_kind(found, type(event), matched)
                self._text += event.text
            else:
                self._switch_kind(found, None, matched)
                found.append(event)
        self._switch_kind(found, None, matched)
        return found

    def _switch_kind(
        self,
        found: list[parse_events.ParseEvent],
        kind: TextDeltaType | None,
        matched: str | None = None,
    ) -> None:
        """The kind of event changes: emit the held-back text, without the matched stop string."""
        if kind is not self._kind:
            if matched is not None:
                self._text = truncate_at_stop(self._text, matched)
            self._emit(found, len(self._text))
            self._kind = kind or self._kind

    def _emit(self, found: list[parse_events.ParseEvent], length: int) -> None:
        if length:
            found.append(self._kind(self._text[:length]))
            self._text = self._text[length:]

    def _stop_prefix_length(self) -> int:
        """How many trailing characters may be the beginning of a stop string."""
        longest = max(map(len, self._stops)) - 1
        for length in range(min(longest, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-length:]) for stop in self._stops):
                return length
        return 0


def truncate_at_stop(text: str, stop: str) -> str:
    """`text` up to the last occurrence of `stop`, or all of it if there is none."""
    at = text.rfind(stop)
    return text if at < 0 else text[:at]
