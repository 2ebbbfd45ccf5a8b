"""Tokens as a conversation: who said what, thoughts and calls apart, each part with its tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


class TokenText(Protocol):
    """A tokenizer, as far as a reader needs one."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """What each token adds to the text."""

    def is_special(self, token_id: int) -> bool:
        """Whether it is a marker that text cannot spell."""


OpenTokenText = Callable[[Path], TokenText | None]  # of a folder that may hold a tokenizer


class TokenIdText:
    """Where no tokenizer is left: ids."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [f"[{token}]" for token in ids]

    def is_special(self, token_id: int) -> bool:  # noqa: ARG002
        return False


@dataclass(slots=True)
class MessagePart:
    """A stretch of a message: text, thinking, call or result; tokens `first` to before `until`."""

    kind: str
    first: int
    until: int
    text: str = ""


@dataclass(slots=True)
class TokenizedMessage:
    """A message. `sampled`: the policy wrote some of it."""

    role: str
    sampled: bool = False
    parts: list[MessagePart] = field(default_factory=list)


ROLES = {
    "<|system|>": "system",
    "<|user|>": "user",
    "<|assistant|>": "assistant",
    "<|observation|>": "tool",
}
OPENING = {"<think>": "thinking", "<tool_call>": "call", "<tool_response>": "result"}
CLOSING = {"</think>", "</tool_call>", "</tool_response>"}
WITHIN = {  # a call: name, then arguments
    "<arg_key>": "\n",
    "</arg_key>": " = ",
    "<arg_value>": "",
    "</arg_value>": "",
}


def parse_messages(
    pieces: Sequence[str], added: Sequence[bool], sampled: Sequence[bool]
) -> list[TokenizedMessage]:
    """The messages that markers of GLM's template set apart. Where a sequence has none of them,
    what was read and what was sampled take turns.

    >>> words = ["<|user|>", "hi", "<|assistant|>", "<think>", "hm", "</think>", "yes", "<|user|>"]
    >>> added = [word[0] == "<" for word in words]
    >>> [(m.role, [(p.kind, p.text) for p in m.parts])
    ...  for m in parse_messages(words, added, [False] * 4 + [True] * 4)]
    [('user', [('text', 'hi')]), ('assistant', [('thinking', 'hm'), ('text', 'yes')])]
    """
    known = any(is_added and piece in ROLES for piece, is_added in zip(pieces, added, strict=True))
    found = list(_marked(pieces, added, sampled) if known else _turns(pieces, sampled))
    for message in found:
        message.parts = [part for part in message.parts if part.text.strip() or part.kind == "call"]
    # What stands before the first role is the template's own, such as [gMASK]<sop>.
    return [message for message in found if message.parts and message.role]


def _marked(
    pieces: Sequence[str], added: Sequence[bool], sampled: Sequence[bool]
) -> Iterator[TokenizedMessage]:
    message = TokenizedMessage("")
    part: MessagePart | None = None
    for place, piece in enumerate(pieces):
        marker = piece if added[place] else ""
        if marker in ROLES:
            yield message
            message, part = TokenizedMessage(ROLES[marker]), None
            continue  # a sampled one only ends the reply before it
        message.sampled |= sampled[place]
        if marker in OPENING or marker in CLOSING:
            kind = OPENING.get(marker, "text")
            part = MessagePart(kind, place, place + 1)
            message.parts.append(part)
            continue
        if part is None:
            part = MessagePart("text", place, place)
            message.parts.append(part)
        part.until = place + 1
        if not marker or part.kind != "call":
            part.text += "" if marker.startswith("<|end") else piece
        else:
            part.text += WITHIN.get(marker, piece)
    yield message


def _turns(pieces: Sequence[str], sampled: Sequence[bool]) -> Iterator[TokenizedMessage]:
    message: TokenizedMessage | None = None
    for place, (piece, wrote) in enumerate(zip(pieces, sampled, strict=True)):
        if message is None or message.sampled != wrote:
            if message is not None:
                yield message
            role = "reply" if wrote else "prompt"
            message = TokenizedMessage(role, wrote, [MessagePart("text", place, place)])
        message.parts[0].text += piece
        message.parts[0].until = place + 1
    if message is not None:
        yield message
