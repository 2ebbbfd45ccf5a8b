"""The tokens of a session: each turn holds what it adds, and knows the turn before it.

A path from the first turn to a last one is a branch: exactly what an engine had before it at the
end. Where a past was changed the tree forks; what branches share is stored once. Four bytes a
token, four more for each that was sampled, and the messages compressed beside them.
"""

import json
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import orjson

from paddock.records import Completion, FinishReason, Message, Segment, Turn, json_codec

_LEVEL = 1  # of compression: texts shrink to a third at the speed of the disk


@dataclass(slots=True, eq=False)
class TurnNode:
    """One turn: what came, and what was sampled."""

    parent: "TurnNode | None"
    number: int  # turns of the session recorded before this one
    added: "array[int]"  # of the prompt, what follows the turn before
    ids: "array[int]"
    logprobs: "array[float]"
    versions: tuple[Segment, ...]
    finish: FinishReason
    forced: tuple[int, ...]
    key: bytes  # of the conversation up to this reply
    reasoning_digest: bytes | None
    entries: int  # of the conversation up to this reply
    fork_reason: str = ""  # why it does not go on from the turn before it
    children: int = 0
    tokens: int = field(init=False)  # of the branch up to here
    _said: bytes = b""

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

    def store_messages(self, came: Sequence[Message], reply: Message) -> None:
        """Remember what was said, for whoever wants to read it."""
        self._said = zlib.compress(_written((*came, reply)), _LEVEL)

    def messages(self) -> tuple[tuple[Message, ...], Message]:
        """The messages that came with this turn, and the reply."""
        rows = json.loads(zlib.decompress(self._said))
        *came, reply = (json_codec.decode(Message, row) for row in rows)
        return tuple(came), reply


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
        """Tokens that a policy wrote, over all branches."""
        return sum(len(node.ids) for node in self.nodes)

    @property
    def nbytes(self) -> int:
        """Of tokens, log-probabilities and texts."""
        return sum(
            node.added.itemsize * (len(node.added) + len(node.ids))
            + node.logprobs.itemsize * len(node.logprobs)
            + len(node._said)
            for node in self.nodes
        )


def _written(messages: Sequence[Message]) -> bytes:
    try:
        return orjson.dumps(messages)  # records too, as `encode` has them
    except TypeError:  # numbers beyond 64 bits
        rows = [json_codec.encode(message) for message in messages]
        return json.dumps(rows, ensure_ascii=False, separators=(",", ":")).encode()
