"""What is heard of a reply while it is read, and the whole of it at the end."""

from dataclasses import dataclass

from paddock.records import Message


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningRetraction:
    """The last of the reasoning, this much, was the answer. It follows once more as content."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArgumentsDelta:
    """The next piece of a call's arguments; all of them, joined, are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    index: int


@dataclass(frozen=True, slots=True)
class ToolCallDiscard:
    """A call that had started is none; what was said follows as content."""

    index: int


ParseEvent = (
    ReasoningDelta
    | ContentDelta
    | ReasoningRetraction
    | ToolCallStart
    | ToolCallArgumentsDelta
    | ToolCallEnd
    | ToolCallDiscard
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCompletion:
    """A whole reply."""

    message: Message
    reasoning_tokens: int  # sampled while thinking, </think> included
    notes: tuple[str, ...] = ()  # what was wrong with it, in order
