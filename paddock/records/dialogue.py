"""A conversation to learn from."""

from dataclasses import dataclass
from math import isfinite
from typing import Literal, get_args

from paddock.records.message import Message, ToolSpec

ThinkingMode = Literal["interleaved", "preserved", "turns", "off"]
MessagePart = Literal["message", "reasoning", "content", "calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMaskSpan:
    """A piece of a reply that stays in the context but is not learnt, such as an error.

    `start` to before `end` (None: to the end of the part) counts characters of the reasoning or the
    content, and whole calls in "calls". "message" is all of the reply, with the token that ends it.
    """

    message: int
    part: MessagePart = "message"
    start: int = 0
    end: int | None = None

    def __post_init__(self) -> None:
        if self.part not in get_args(MessagePart):
            raise ValueError(f"part: {self.part!r} is none of {', '.join(get_args(MessagePart))}")
        if self.start < 0 or (self.end is not None and self.end < self.start):
            raise ValueError(f"start, end: {self.start} to {self.end} is no range")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """Messages, the tools they may call, and what of them is to be learnt.

    interleaved  thoughts are shown back to the model until the next user message
    preserved    thoughts are shown back for good
    turns        thinking is on for the replies that have thoughts and off for the others, for good
    off          there is no thinking; thoughts in the messages are left out

    >>> Dialogue(messages=(Message(role="user", content="Hi"),))
    Traceback (most recent call last):
    ValueError: messages: none of 1 is a reply, so there is nothing to learn
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    thinking: ThinkingMode = "interleaved"
    untrained: tuple[LossMaskSpan, ...] = ()
    weight: float = 1.0  # of each of its tokens in the loss
    id: str = ""
    source: str = ""  # where it came from, in words

    def __post_init__(self) -> None:
        if all(message.role != "assistant" for message in self.messages):
            count = len(self.messages)
            raise ValueError(f"messages: none of {count} is a reply, so there is nothing to learn")
        if self.thinking not in get_args(ThinkingMode):
            modes = ", ".join(get_args(ThinkingMode))
            raise ValueError(f"thinking: {self.thinking!r} is none of {modes}")
        if not isfinite(self.weight) or self.weight < 0:
            raise ValueError(f"weight: {self.weight} is not a finite number of zero or more")
        for i, span in enumerate(self.untrained):
            self._check(f"untrained[{i}]", span)

    def _check(self, path: str, span: LossMaskSpan) -> None:
        if not 0 <= span.message < len(self.messages):
            raise ValueError(f"{path}: message {span.message} of {len(self.messages)} is not there")
        message = self.messages[span.message]
        if message.role != "assistant":
            raise ValueError(f"{path}: message {span.message} is of the {message.role}, no reply")
        parts = {"reasoning": message.reasoning or "", "content": message.content}
        size = len(message.tool_calls) if span.part == "calls" else len(parts.get(span.part, ""))
        last = span.start if span.end is None else span.end
        if span.part != "message" and last > size:
            raise ValueError(f"{path}: ends at {last}, but the {span.part} ends at {size}")
