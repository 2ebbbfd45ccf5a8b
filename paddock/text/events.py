"""What is heard of a reply while it is read, and the whole of it at the end."""

from dataclasses import dataclass

from paddock.records import Message


@dataclass(frozen=True, slots=True)
class ReasoningText:
    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    text: str


@dataclass(frozen=True, slots=True)
class NotReasoning:
    """The last of the reasoning, this much, was the answer. It follows once more as content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments; all of them, joined, are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    index: int


@dataclass(frozen=True, slots=True)
class CallDropped:
    """A call that had started is none; what was said follows as content."""

    index: int


Event = (
    ReasoningText
    | ContentText
    | NotReasoning
    | CallStarted
    | CallArguments
    | CallEnded
    | CallDropped
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A whole reply."""

    message: Message
    reasoning_tokens: int  # sampled while thinking, </think> included
    notes: tuple[str, ...] = ()  # what was wrong with it, in order
