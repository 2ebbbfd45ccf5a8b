"""Prefixes that rollouts share, as a radix tree: the structure of a prefix cache."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paddock.dashboard.messages import TokenText
from paddock.journal import LedgerView

MAX_ROLLOUTS = 96  # in one tree
MAX_TOKENS = 4096  # of each rollout
LABEL_CHARS = 80  # of a node


@dataclass(slots=True)
class PrefixTreeNode:
    """A run of tokens without branches, and the nodes that follow it."""

    edge: tuple[int, ...]
    rollouts: int  # that pass through it
    children: dict[int, "PrefixTreeNode"] = field(default_factory=dict)  # by first token


def build_prefix_tree(sequences: Sequence[Sequence[int]]) -> PrefixTreeNode:
    """The radix tree of token sequences.

    >>> root = build_prefix_tree([(1, 2, 3), (1, 2, 4), (1, 2, 4, 5)])
    >>> root.children[1].edge, root.children[1].rollouts, list(root.children[1].children)
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
            if same < len(child.edge):  # branches off within the edge
                upper = PrefixTreeNode(child.edge[:same], child.rollouts)
                upper.children[child.edge[same]] = child
                child.edge = child.edge[same:]
                node.children[rest[0]] = child = upper
            child.rollouts += 1
            node, rest = child, rest[same:]
    return root


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def prefix_tree_view(
    ledger: LedgerView, step: int | None, token_text: TokenText
) -> Mapping[str, Any]:
    """The newest rollouts of a training step (None: of all steps) as one tree.

    Of `total_tokens`, `unique_tokens` remain if shared prefixes are stored once.
    """
    sequences: list[Sequence[int]] = []
    groups = 0
    for entry in ledger.list_groups(MAX_ROLLOUTS, update=step):
        rollouts = ledger.group_trajectories(entry.ordinal)
        groups += bool(rollouts)
        sequences += [
            branches[0].token_ids[:MAX_TOKENS] for branches in rollouts if branches[0].turns
        ]
        if len(sequences) >= MAX_ROLLOUTS:
            break
    root = build_prefix_tree(sequences[:MAX_ROLLOUTS])
    nodes = list(_nodes(root, token_text))
    return {
        "rollouts": root.rollouts,
        "groups": groups,
        "total_tokens": sum(map(len, sequences[:MAX_ROLLOUTS])),
        "unique_tokens": sum(node["tokens"] for node in nodes),
        "nodes": nodes,
    }


def _nodes(root: PrefixTreeNode, token_text: TokenText) -> Iterator[dict[str, Any]]:
    """Every node with the number of its parent, parents first."""
    waiting: list[tuple[PrefixTreeNode, int | None]] = [(root, None)]
    number = 0
    while waiting:
        node, parent = waiting.pop()
        text = "".join(token_text.pieces(node.edge[:LABEL_CHARS]))[:LABEL_CHARS]
        yield {
            "id": number,
            "parent": parent,
            "tokens": len(node.edge),
            "rollouts": node.rollouts,
            "text": text,
        }
        waiting += [(child, number) for child in node.children.values()]
        number += 1
