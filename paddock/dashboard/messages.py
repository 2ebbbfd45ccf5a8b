"""Tokens as chat messages: roles, and text, reasoning, tool calls and results with their tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


class TokenText(Protocol):
    """What the dashboard needs of a tokenizer."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text that each token adds."""

    def is_special(self, token_id: int) -> bool:
        """Whether it is a special token."""


OpenTokenText = Callable[[Path], TokenText | None]  # None: the folder holds no tokenizer


class TokenIdText:
    """Shows token ids, for runs without a tokenizer."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [f"[{token}]" for token in ids]

    def is_special(self, token_id: int) -> bool:  # noqa: ARG002
        return False


@dataclass(slots=True)
class MessagePart:
    """Part of a message: text, reasoning, call or result; tokens `first` to `until` (exclusive)."""

    kind: str
    first: int
    until: int
    text: str = ""


@dataclass(slots=True)
class TokenizedMessage:
    """A message. `sampled`: the policy generated some of it."""

    role: str
    sampled: bool = False
    parts: list[MessagePart] = field(default_factory=list)


ROLES = {
    "<|system|>": "system",
    "<|user|>": "user",
    "<|assistant|>": "assistant",
    "<|observation|>": "tool",
}
OPENING = {"<think>": "reasoning", "<tool_call>": "call", "<tool_response>": "result"}
CLOSING = {"</think>", "</tool_call>", "</tool_response>"}
WITHIN = {  # markers of the arguments of a tool call, and how they are shown
    "<arg_key>": "\n",
    "</arg_key>": " = ",
    "<arg_value>": "",
    "</arg_value>": "",
}


def parse_messages(
    pieces: Sequence[str], special: Sequence[bool], sampled: Sequence[bool]
) -> list[TokenizedMessage]:
    """Split tokens into messages at the role markers of GLM's chat template.

    Without such markers, prompt and sampled tokens alternate.

    >>> words = ["<|user|>", "hi", "<|assistant|>", "<think>", "hm", "</think>", "yes", "<|user|>"]
    >>> special = [word[0] == "<" for word in words]
    >>> [(m.role, [(p.kind, p.text) for p in m.parts])
    ...  for m in parse_messages(words, special, [False] * 4 + [True] * 4)]
    [('user', [('text', 'hi')]), ('assistant', [('reasoning', 'hm'), ('text', 'yes')])]
    """
    has_roles = any(mark and piece in ROLES for piece, mark in zip(pieces, special, strict=True))
    found = list(_marked(pieces, special, sampled) if has_roles else _turns(pieces, sampled))
    for message in found:
        message.parts = [part for part in message.parts if part.text.strip() or part.kind == "call"]
    # Tokens before the first role belong to the template, such as [gMASK]<sop>.
    return [message for message in found if message.parts and message.role]


def _marked(
    pieces: Sequence[str], special: Sequence[bool], sampled: Sequence[bool]
) -> Iterator[TokenizedMessage]:
    """Messages between role markers."""
    message = TokenizedMessage("")
    part: MessagePart | None = None
    for position, piece in enumerate(pieces):
        marker = piece if special[position] else ""
        if marker in ROLES:
            yield message
            message, part = TokenizedMessage(ROLES[marker]), None
            continue  # a sampled role marker only ends the reply before it
        message.sampled |= sampled[position]
        if marker in OPENING or marker in CLOSING:
            kind = OPENING.get(marker, "text")
            part = MessagePart(kind, position, position + 1)
            message.parts.append(part)
            continue
        if part is None:
            part = MessagePart("text", position, position)
            message.parts.append(part)
        part.until = position + 1
        if not marker or part.kind != "call":
            part.text += "" if marker.startswith("<|end") else piece
        else:
            part.text += WITHIN.get(marker, piece)
    yield message


def _turns(pieces: Sequence[str], sampled: Sequence[bool]) -> Iterator[TokenizedMessage]:
    """Alternating prompt and reply, of tokens without role markers."""
    message: TokenizedMessage | None = None
    for position, (piece, is_sampled) in enumerate(zip(pieces, sampled, strict=True)):
        if message is None or message.sampled != is_sampled:
            if message is not None:
                yield message
            role = "reply" if is_sampled else "prompt"
            message = TokenizedMessage(role, is_sampled, [MessagePart("text", position, position)])
        message.parts[0].text += piece
        message.parts[0].until = position + 1
    if message is not None:
        yield message
