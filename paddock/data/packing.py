"""Documents into rows: three ways to fill a batch, all without padding.

truncate  one stream of documents, cut wherever a row is full (pre-training)
best_fit  documents fitted together; only what is longer than a row is cut (mid-training)
rows      one document a row, up to so many tokens a batch (small models, short texts)
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Literal

from paddock.data.mixture import DocumentSpan

PackingMode = Literal["truncate", "best_fit", "rows"]
Row = list[DocumentSpan]
NextDocument = Callable[[], DocumentSpan]  # the next whole document


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingLimits:
    seq_len: int  # tokens in a row at most
    tokens: int  # in a batch at most
    lookahead: float = 1.0  # batches more that best_fit chooses from


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingResult:
    """A batch of all ranks, and the pieces that wait for the next."""

    rows: list[Row]
    carried_over: list[DocumentSpan]
    dropped_tokens: int = 0  # left out for good
    split_documents: int = 0  # longer than a row


def pack_truncating(
    draw: NextDocument, waiting: Sequence[DocumentSpan], shape: PackingLimits
) -> PackingResult:
    """Every token exactly once, in rows that are all full. Where a document is cut depends on what
    came before it, so that the model sees texts begin anywhere. What is cut off begins a row of a
    later batch: however long a document is, it never fills a batch, and only after so many batches
    as it has rows do long documents have their full share."""
    ready, later = list(waiting), []
    rows: list[Row] = []
    split = 0
    for _ in range(shape.tokens // shape.seq_len):
        row, room = Row(), shape.seq_len
        while room:
            piece, rest = (ready.pop(0) if ready else draw()).split_at(room)
            row.append(piece)
            room -= len(piece)
            if rest:
                later.append(rest)
                split += piece.start == 0
        rows.append(row)
    return PackingResult(rows=rows, carried_over=[*ready, *later], split_documents=split)


def pack_best_fit(
    draw: NextDocument, waiting: Sequence[DocumentSpan], shape: PackingLimits
) -> PackingResult:
    """The longest pieces first, each into the fullest row that still has room for it.

    Every row begins with the piece that has waited longest, so none waits for ever.
    """
    pool, split = list(waiting), 0
    held = sum(map(len, pool))
    while held < shape.tokens * (1 + shape.lookahead):
        document = draw()
        pool += document.chunks(shape.seq_len)
        held += len(document)
        split += len(document) > shape.seq_len
    count = shape.tokens // shape.seq_len
    rows = [[piece] for piece in pool[:count]]
    rooms = sorted((shape.seq_len - len(row[0]), i) for i, row in enumerate(rows))
    left: set[int] = set()
    for number in sorted(range(count, len(pool)), key=lambda n: -len(pool[n])):
        size = len(pool[number])
        at = bisect_left(rooms, (size, 0))
        if at == len(rooms):
            left.add(number)
            continue
        room, i = rooms.pop(at)
        rows[i].append(pool[number])
        insort(rooms, (room - size, i))
    return PackingResult(
        rows=rows, carried_over=[pool[n] for n in sorted(left)], split_documents=split
    )


def pack_rows(
    draw: NextDocument, waiting: Sequence[DocumentSpan], shape: PackingLimits
) -> PackingResult:
    """Documents as they come, until the next would be too many tokens. What one has beyond the
    context is left out."""
    rest = list(waiting)
    packed: list[Row] = []
    room, cut = shape.tokens, 0
    while True:
        document = rest.pop(0) if rest else draw()
        piece, beyond = document.split_at(shape.seq_len)
        if len(piece) > room:
            return PackingResult(rows=packed, carried_over=[document, *rest], dropped_tokens=cut)
        packed.append([piece])
        room -= len(piece)
        cut += len(beyond) if beyond else 0


PACKERS: dict[
    PackingMode, Callable[[NextDocument, Sequence[DocumentSpan], PackingLimits], PackingResult]
] = {
    "truncate": pack_truncating,
    "best_fit": pack_best_fit,
    "rows": pack_rows,
}


def shard_rows(rows: Sequence[Row], *, rank: int, world: int) -> list[Row]:
    """The rows of one rank: all ranks together have each row once, and about as many tokens.

    >>> row = lambda size: [DocumentSpan("code", size, 0, size)]
    >>> [[len(r[0]) for r in shard_rows([row(5), row(2), row(3)], rank=i, world=2)] for i in (0, 1)]
    [[5], [2, 3]]
    """
    sizes = [sum(map(len, row)) for row in rows]
    loads = [(0, other) for other in range(world)]
    heapify(loads)
    mine = []
    for number in sorted(range(len(rows)), key=lambda n: -sizes[n]):
        load, owner = loads[0]
        heapreplace(loads, (load + sizes[number], owner))
        if owner == rank:
            mine.append(number)
    return [rows[number] for number in sorted(mine)]
