"""Session tree: token ids of a session, each turn storing only what it adds to its parent.

A path from the root to a leaf is a branch: exactly the tokens that the engine had at its end. The
tree forks where the history was changed; a shared prefix is stored once. 4 bytes per token, 4 more
per sampled token, and the compressed messages.
"""

import json
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import orjson

from paddock.records import Completion, FinishReason, Message, Segment, Turn, json_codec

_LEVEL = 1  # zlib level: compresses text to a third, fast enough


@dataclass(slots=True, eq=False)
class TurnNode:
    """One turn: new prompt tokens and the completion."""

    parent: "TurnNode | None"
    number: int  # turns of the session recorded before this one
    added: "array[int]"  # prompt tokens after the turn before
    ids: "array[int]"
    logprobs: "array[float]"
    versions: tuple[Segment, ...]
    finish: FinishReason
    forced: tuple[int, ...]
    key: bytes  # of the conversation up to this reply
    reasoning_digest: bytes | None
    entries: int  # of the conversation up to this reply
    fork_reason: str = ""  # why it does not continue the newest turn
    children: int = 0
    tokens: int = field(init=False)  # of the branch up to here
    _messages: bytes = b""

    def __post_init__(self) -> None:
        before = self.parent.tokens if self.parent else 0
        self.tokens = before + len(self.added) + len(self.ids)

    def path(self) -> "list[TurnNode]":
        """From the first turn to this one."""
        found: list[TurnNode] = []
        node: TurnNode | None = self
        while node is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    def token_ids(self) -> "array[int]":
        """Every token of the branch up to here."""
        return array("i", b"".join(part for node in self.path() for part in (node.added, node.ids)))

    def completion(self) -> Completion:
        return Completion(
            token_ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            versions=self.versions,
            finish=self.finish,
            forced=self.forced,
        )

    def turn(self, *, trained: bool) -> Turn:
        return Turn(added_ids=tuple(self.added), completion=self.completion(), trained=trained)

    def store_messages(self, new_messages: Sequence[Message], reply: Message) -> None:
        """Store the messages of the turn, compressed, for export."""
        self._messages = zlib.compress(_to_json((*new_messages, reply)), _LEVEL)

    def messages(self) -> tuple[tuple[Message, ...], Message]:
        """The new messages of this turn, and the reply."""
        rows = json.loads(zlib.decompress(self._messages))
        *new_messages, reply = (json_codec.decode(Message, row) for row in rows)
        return tuple(new_messages), reply


@dataclass(slots=True)
class SessionTree:
    """Every turn of a session."""

    nodes: list[TurnNode] = field(default_factory=list)

    def add(self, node: TurnNode) -> None:
        assert node.number == len(self.nodes)
        self.nodes.append(node)
        if node.parent is not None:
            node.parent.children += 1

    def leaves(self) -> Iterator[TurnNode]:
        """The last turn of each branch, in the order in which they were recorded."""
        return (node for node in self.nodes if not node.children)

    @property
    def num_sampled_tokens(self) -> int:
        """Sampled tokens over all branches."""
        return sum(len(node.ids) for node in self.nodes)

    @property
    def nbytes(self) -> int:
        """Bytes of tokens, log-probabilities and messages."""
        return sum(
            node.added.itemsize * (len(node.added) + len(node.ids))
            + node.logprobs.itemsize * len(node.logprobs)
            + len(node._messages)
            for node in self.nodes
        )


def _to_json(messages: Sequence[Message]) -> bytes:
    try:
        return orjson.dumps(messages)  # serialises dataclasses like `json_codec.encode`
    except TypeError:  # numbers beyond 64 bits
        rows = [json_codec.encode(message) for message in messages]
        return json.dumps(rows, ensure_ascii=False, separators=(",", ":")).encode()
