"""A reply as it comes: the engine's tokens into what was thought, said and called.

`Delta` and `Answer` are what an engine delivers, by its looks alone: this room knows no engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from paddock.api.token_decoder import TokenLogprobLike
from paddock.records import Completion, Message, ToolSpec
from paddock.text import CompletionParser, Tokenizer, parse_events

TextDeltaType = type[parse_events.ReasoningDelta] | type[parse_events.ContentDelta]


class RequestOutputLike(Protocol):
    """A finished reply."""

    @property
    def id(self) -> str: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def completion(self) -> Completion: ...
    @property
    def matched_stop(self) -> int | str | None: ...
    @property
    def abort_reason(self) -> str: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def reasoning_tokens(self) -> int: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def prompt_logprobs(self) -> Sequence[float | None]: ...
    @property
    def prompt_top_logprobs(self) -> Sequence[TokenLogprobLike | None]: ...
    @property
    def prompt_requested_logprobs(self) -> Sequence[TokenLogprobLike | None]: ...
    @property
    def top_logprobs(self) -> Sequence[TokenLogprobLike]: ...
    @property
    def requested_logprobs(self) -> Sequence[TokenLogprobLike]: ...
    @property
    def routing(self) -> Any: ...
    @property
    def draft_tokens(self) -> int: ...
    @property
    def accepted_draft_tokens(self) -> int: ...
    @property
    def verify_steps(self) -> int: ...
    @property
    def e2e_latency_s(self) -> float: ...


class OutputDeltaLike(Protocol):
    """What one step added to a reply."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def top_logprobs(self) -> Sequence[TokenLogprobLike]: ...
    @property
    def version(self) -> int: ...
    @property
    def output(self) -> RequestOutputLike | None: ...


class DeltaParser:
    """Reads one reply, delta by delta. The text that ended it, if one did, is cut away.

    With `whole_calls` nothing is told of a call before it is known to be one: what a client hears
    as it comes is then what the reply turns out to be.
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
        self._thoughts: list[str] = []  # as they were told

    def feed(self, delta: OutputDeltaLike) -> list[parse_events.ParseEvent]:
        """What is new; with the last delta everything that was still held back."""
        events = self._parser.feed(delta.token_ids)
        if delta.output is None:
            found = self._held.feed(events)
        else:
            events += self._parser.finish(delta.output.completion.finish)
            self._matched = (
                delta.output.matched_stop if isinstance(delta.output.matched_stop, str) else None
            )
            found = self._held.finish(events, self._matched)
        self._thoughts += [
            event.text for event in found if isinstance(event, parse_events.ReasoningDelta)
        ]
        return [out for event in found for out in self._sure(event)] if self._whole_calls else found

    def _sure(self, event: parse_events.ParseEvent) -> list[parse_events.ParseEvent]:
        """The event, unless it is part of a call that is not over; with a call's end all of it."""
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
        """The reply as somebody heard it who heard it as it came: thoughts that turned out to be
        the answer were told as thoughts first."""
        return replace(self.message, reasoning="".join(self._thoughts) or None)

    @property
    def message(self) -> Message:
        """The reply so far; whole after the last delta."""
        said = self._parser.result.message
        if self._matched is None:
            return said
        content, reasoning = said.content, said.reasoning
        if self._matched in content:
            content = truncate_at_stop(content, self._matched)
        elif reasoning is not None:
            reasoning = truncate_at_stop(reasoning, self._matched) or None
        return Message(
            role="assistant", content=content, reasoning=reasoning, tool_calls=said.tool_calls
        )

    @property
    def reasoning_tokens(self) -> int:
        return self._parser.result.reasoning_tokens

    @property
    def notes(self) -> tuple[str, ...]:
        """What was wrong with the reply."""
        return self._parser.result.notes


class HeldBackText:
    """Text passed on as soon as it cannot be the beginning of a text that ends the reply.

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
                self._turn(found, type(event))
                self._text += event.text
                self._say(found, len(self._text) - self._hopeful())
            else:
                self._turn(found, None)
                found.append(event)
        return found

    def finish(
        self, events: Sequence[parse_events.ParseEvent], matched: str | None
    ) -> list[parse_events.ParseEvent]:
        """All that is left, up to the text that ended the reply."""
        if not self._stops:
            return list(events)
        found: list[parse_events.ParseEvent] = []
        for event in events:
            if isinstance(event, parse_events.ReasoningDelta | parse_events.ContentDelta):
                self._turn(found, type(event), matched)
                self._text += event.text
            else:
                self._turn(found, None, matched)
                found.append(event)
        self._turn(found, None, matched)
        return found

    def _turn(
        self,
        found: list[parse_events.ParseEvent],
        kind: TextDeltaType | None,
        matched: str | None = None,
    ) -> None:
        """Another kind of event comes: what was held back is no end (or has it in it)."""
        if kind is not self._kind:
            if matched is not None:
                self._text = truncate_at_stop(self._text, matched)
            self._say(found, len(self._text))
            self._kind = kind or self._kind

    def _say(self, found: list[parse_events.ParseEvent], length: int) -> None:
        if length:
            found.append(self._kind(self._text[:length]))
            self._text = self._text[length:]

    def _hopeful(self) -> int:
        """How many characters at the end may begin a text that ends the reply."""
        longest = max(map(len, self._stops)) - 1
        for length in range(min(longest, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-length:]) for stop in self._stops):
                return length
        return 0


def truncate_at_stop(text: str, stop: str) -> str:
    """The text before the last `stop` in it, or all of it."""
    at = text.rfind(stop)
    return text if at < 0 else text[:at]
