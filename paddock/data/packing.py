"""Sequence packing without padding, in three modes.

truncate  one stream of documents, cut where a row is full (pre-training)
best_fit  best-fit decreasing; only documents longer than a row are cut (mid-training)
rows      one document per row, up to a number of tokens per batch (small models, short texts)
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Literal

from paddock.data.mixture import DocumentSpan

PackingMode = Literal["truncate", "best_fit", "rows"]
Row = list[DocumentSpan]
NextDocument = Callable[[], DocumentSpan]  # returns the next whole document


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingLimits:
    seq_len: int  # max tokens per row
    tokens: int  # max tokens per batch
    lookahead: float = 1.0  # further batches that best_fit chooses from


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingResult:
    """A global batch, and the spans carried over to the next."""

    rows: list[Row]
    carried_over: list[DocumentSpan]
    dropped_tokens: int = 0  # never trained on
    split_documents: int = 0  # documents cut into several spans


def pack_truncating(
    next_document: NextDocument, carried_over: Sequence[DocumentSpan], limits: PackingLimits
) -> PackingResult:
    """Every token exactly once, all rows full. Where a document is cut depends on what came
    before it, so the model sees texts begin anywhere. The rest of a cut document starts a row of a
    later batch, so a long document never fills a batch by itself; long documents reach their full
    share after as many batches as they have rows."""
    ready, later = list(carried_over), []
    rows: list[Row] = []
    split = 0
    for _ in range(limits.tokens // limits.seq_len):
        row, free = Row(), limits.seq_len
        while free:
            span, rest = (ready.pop(0) if ready else next_document()).split_at(free)
            row.append(span)
            free -= len(span)
            if rest:
                later.append(rest)
                split += span.start == 0
        rows.append(row)
    return PackingResult(rows=rows, carried_over=[*ready, *later], split_documents=split)


def pack_best_fit(
    next_document: NextDocument, carried_over: Sequence[DocumentSpan], limits: PackingLimits
) -> PackingResult:
    """Longest spans first, each into the fullest row that still fits it.

    Every row begins with the span that has waited longest, so that none is starved.
    """
    pool, split = list(carried_over), 0
    available = sum(map(len, pool))
    while available < limits.tokens * (1 + limits.lookahead):
        document = next_document()
        pool += document.chunks(limits.seq_len)
        available += len(document)
        split += len(document) > limits.seq_len
    count = limits.tokens // limits.seq_len
    rows = [[span] for span in pool[:count]]
    free_by_row = sorted((limits.seq_len - len(row[0]), i) for i, row in enumerate(rows))
    left: set[int] = set()
    for number in sorted(range(count, len(pool)), key=lambda n: -len(pool[n])):
        size = len(pool[number])
        at = bisect_left(free_by_row, (size, 0))
        if at == len(free_by_row):
            left.add(number)
            continue
        free, i = free_by_row.pop(at)
        rows[i].append(pool[number])
        insort(free_by_row, (free - size, i))
    return PackingResult(
        rows=rows, carried_over=[pool[n] for n in sorted(left)], split_documents=split
    )


def pack_rows(
    next_document: NextDocument, carried_over: Sequence[DocumentSpan], limits: PackingLimits
) -> PackingResult:
    """One document per row, in order, until the next exceeds the batch. Tokens beyond `seq_len`
    are dropped."""
    rest = list(carried_over)
    packed: list[Row] = []
    free, cut = limits.tokens, 0
    while True:
        document = rest.pop(0) if rest else next_document()
        span, beyond = document.split_at(limits.seq_len)
        if len(span) > free:
            return PackingResult(rows=packed, carried_over=[document, *rest], dropped_tokens=cut)
        packed.append([span])
        free -= len(span)
        cut += len(beyond) if beyond else 0


PACKERS: dict[
    PackingMode, Callable[[NextDocument, Sequence[DocumentSpan], PackingLimits], PackingResult]
] = {
    "truncate": pack_truncating,
    "best_fit": pack_best_fit,
    "rows": pack_rows,
}


def shard_rows(rows: Sequence[Row], *, rank: int, world_size: int) -> list[Row]:
    """The rows of one rank; each row goes to exactly one rank, balanced by tokens.

    >>> row = lambda size: [DocumentSpan("code", size, 0, size)]
    >>> rows = [row(5), row(2), row(3)]
    >>> [[len(r[0]) for r in shard_rows(rows, rank=i, world_size=2)] for i in (0, 1)]
    [[5], [2, 3]]
    """
    sizes = [sum(map(len, row)) for row in rows]
    loads = [(0, other) for other in range(world_size)]
    heapify(loads)
    mine = []
    for number in sorted(range(len(rows)), key=lambda n: -sizes[n]):
        load, owner = loads[0]
        heapreplace(loads, (load + sizes[number], owner))
        if owner == rank:
            mine.append(number)
    return [rows[number] for number in sorted(mine)]
