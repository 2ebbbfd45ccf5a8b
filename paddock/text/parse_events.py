"""Events that the completion parser emits, and its final result."""

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
    """This trailing part of the reasoning was content; it follows again as content."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArgumentsDelta:
    """A piece of a call's arguments; all pieces joined are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    index: int


@dataclass(frozen=True, slots=True)
class ToolCallDiscard:
    """A started call is invalid; its text follows as content."""

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
    """A parsed completion."""

    message: Message
    reasoning_tokens: int  # including </think>
    notes: tuple[str, ...] = ()  # parse problems, in order
