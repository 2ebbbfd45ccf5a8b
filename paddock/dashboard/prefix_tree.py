"""What attempts share: their tokens as a radix tree, the shape that a prefix cache gives them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paddock.dashboard.messages import TokenText
from paddock.journal import LedgerView

MAX_ROLLOUTS = 96  # in one picture
TOKENS = 4096  # of each
LEGIBLE = 80  # characters of a node


@dataclass(slots=True)
class PrefixTreeNode:
    """Tokens that nothing branches off, and what follows them."""

    edge: tuple[int, ...]
    attempts: int
    children: dict[int, "PrefixTreeNode"] = field(default_factory=dict)  # by first token


def build_prefix_tree(sequences: Sequence[Sequence[int]]) -> PrefixTreeNode:
    """
    >>> root = build_prefix_tree([(1, 2, 3), (1, 2, 4), (1, 2, 4, 5)])
    >>> root.children[1].edge, root.children[1].attempts, list(root.children[1].children)
    ((1, 2), 3, [3, 4])
    """
    root = PrefixTreeNode((), len(sequences))
    for sequence in sequences:
        node, rest = root, tuple(sequence)
        while rest:
            child = node.children.get(rest[0])
            if child is None:
                node.children[rest[0]] = PrefixTreeNode(rest, 1)
                break
            same = _shared(child.edge, rest)
            if same < len(child.edge):  # it branches off in the middle
                upper = PrefixTreeNode(child.edge[:same], child.attempts)
                upper.children[child.edge[same]] = child
                child.edge = child.edge[same:]
                node.children[rest[0]] = child = upper
            child.attempts += 1
            node, rest = child, rest[same:]
    return root


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def prefix_tree_view(ledger: LedgerView, update: int | None, words: TokenText) -> Mapping[str, Any]:
    """The newest attempts of an update (of all, if None) as one tree; `kept` of `whole` tokens are
    left when what is shared is stored once."""
    read: list[Sequence[int]] = []
    groups = 0
    for entry in ledger.list_groups(MAX_ROLLOUTS, update=update):
        attempts = ledger.group_trajectories(entry.ordinal)
        groups += bool(attempts)
        read += [branches[0].token_ids[:TOKENS] for branches in attempts if branches[0].turns]
        if len(read) >= MAX_ROLLOUTS:
            break
    root = build_prefix_tree(read[:MAX_ROLLOUTS])
    nodes = list(_listed(root, words))
    return {
        "attempts": root.attempts,
        "groups": groups,
        "whole": sum(map(len, read[:MAX_ROLLOUTS])),
        "kept": sum(node["tokens"] for node in nodes),
        "nodes": nodes,
    }


def _listed(root: PrefixTreeNode, words: TokenText) -> Iterator[dict[str, Any]]:
    waiting: list[tuple[PrefixTreeNode, int | None]] = [(root, None)]
    number = 0
    while waiting:
        node, parent = waiting.pop()
        text = "".join(words.pieces(node.edge[:LEGIBLE]))[:LEGIBLE]
        yield {
            "id": number,
            "parent": parent,
            "tokens": len(node.edge),
            "attempts": node.attempts,
            "text": text,
        }
        waiting += [(child, number) for child in node.children.values()]
        number += 1
