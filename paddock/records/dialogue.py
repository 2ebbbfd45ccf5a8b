"""A conversation to train on (SFT): messages, tools, thinking mode and loss mask."""

from dataclasses import dataclass
from math import isfinite
from typing import Literal, get_args

from paddock.records.message import Message, ToolSpec

ThinkingMode = Literal["interleaved", "preserved", "turns", "off"]
MessagePart = Literal["message", "reasoning", "content", "calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMaskSpan:
    """A part of an assistant message that stays in the context but has no loss, such as an error.

    The span is `[start, end)`; `end` None means the end of the part. Positions count characters in
    "reasoning" and "content", and whole tool calls in "calls". "message" covers the whole message,
    including the token that ends it.
    """

    message: int  # index into Dialogue.messages
    part: MessagePart = "message"
    start: int = 0
    end: int | None = None

    def __post_init__(self) -> None:
        if self.part not in get_args(MessagePart):
            parts = ", ".join(get_args(MessagePart))
            raise ValueError(f"part: must be one of {parts}, got {self.part!r}")
        if self.start < 0:
            raise ValueError(f"start: must be at least 0, got {self.start}")
        if self.end is not None and self.end < self.start:
            raise ValueError(f"end: {self.end} must not be smaller than start ({self.start})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """Messages, the tools they may call, and which parts are trained on.

    `thinking` says how reasoning is rendered:

    interleaved  reasoning stays in the context until the next user message
    preserved    reasoning stays in the context for the whole dialogue
    turns        thinking is on for messages that have reasoning and off for the others, throughout
    off          no thinking; reasoning in the messages is left out

    >>> Dialogue(messages=(Message(role="user", content="Hi"),))
    Traceback (most recent call last):
    ValueError: messages: none of 1 comes from the assistant: there is nothing to train on
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    thinking: ThinkingMode = "interleaved"
    untrained: tuple[LossMaskSpan, ...] = ()
    weight: float = 1.0  # loss weight of each of its tokens
    id: str = ""
    source: str = ""  # where it came from, free text

    def __post_init__(self) -> None:
        if all(message.role != "assistant" for message in self.messages):
            count = len(self.messages)
            raise ValueError(
                f"messages: none of {count} comes from the assistant: there is nothing to train on"
            )
        if self.thinking not in get_args(ThinkingMode):
            modes = ", ".join(get_args(ThinkingMode))
            raise ValueError(f"thinking: must be one of {modes}, got {self.thinking!r}")
        if not isfinite(self.weight) or self.weight < 0:
            raise ValueError(f"weight: must be finite and at least 0, got {self.weight}")
        for i, span in enumerate(self.untrained):
            self._check_span(f"untrained[{i}]", span)

    def _check_span(self, path: str, span: LossMaskSpan) -> None:
        if not 0 <= span.message < len(self.messages):
            count = len(self.messages)
            raise ValueError(f"{path}: message {span.message} not found; the dialogue has {count}")
        message = self.messages[span.message]
        if message.role != "assistant":
            raise ValueError(
                f"{path}: message {span.message} must come from the assistant, got {message.role}"
            )
        parts = {"reasoning": message.reasoning or "", "content": message.content}
        size = len(message.tool_calls) if span.part == "calls" else len(parts.get(span.part, ""))
        end = span.start if span.end is None else span.end
        if span.part != "message" and end > size:
            raise ValueError(f"{path}: ends at {end}, but the length of {span.part} is {size}")
