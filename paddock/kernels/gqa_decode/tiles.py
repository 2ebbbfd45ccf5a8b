"""Tiling of chunked prefill: query tiles, and splits of their keys.

A tile is a few neighbouring queries of one span with all heads that share a key head. Lengths are
known here, unlike in a batch that decodes, so that the cut can even them out.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paddock.kernels.spans import Span

SMALL, MIDDLE, LARGE = 16, 64, 128  # rows of a tile: queries times the heads of a group
ENOUGH = 128  # programs that keep a large GPU busy
LEAST = 256  # keys of a part, at least
PARTS = (1, 8, 64)  # few choices: each is a kernel of its own
MOST_SUMS = 1 << 14  # parts of all queries together: each leaves a sum for every head
# From so many tokens on a whole document is worth launches of its own.
LONG = 1024


class QueryTile(NamedTuple):
    """Queries [query, query + queries) see keys from `key` on, the first of them `seen` keys and
    each of the others one more; their answers go to rows from `out` on."""

    query: int
    out: int
    key: int
    queries: int
    seen: int

    def looked_at(self, window: int | None) -> int:
        """Keys that any of its queries sees."""
        last = self.seen + self.queries - 1
        return last if window is None else min(last, window + self.queries - 1)


class TileSchedule(NamedTuple):
    """What one launch does, and what is left to others."""

    table: Tensor | None  # [tiles, 5] int32, those with the most keys first; None without any
    rows: int
    parts: int
    whole: tuple[tuple[int, Span], ...]  # long documents, and the row of each one's first answer


@lru_cache(maxsize=16)
def plan(
    spans: tuple[Span, ...], group: int, groups: int, window: int | None, device: torch.device
) -> TileSchedule:
    """For `groups` key heads that `group` heads share each. All layers of a step ask alike."""
    starts = np.cumsum([0, *(span.queries for span in spans)]).tolist()
    placed = [*zip(starts, spans, strict=False)]
    whole = tuple((out, span) for out, span in placed if is_long(span, window))
    placed = [(out, span) for out, span in placed if not is_long(span, window)]
    if not placed:
        return TileSchedule(None, 0, 0, whole)
    rows = rows_for([span.queries * group for _, span in placed], groups)
    tiles = [tile for out, span in placed for tile in cut(span, out, rows // group)]
    tiles.sort(key=lambda tile: -tile.looked_at(window))
    parts = parts_for([tile.looked_at(window) for tile in tiles], groups)
    parts = max(each for each in PARTS if each == 1 or each <= min(parts, MOST_SUMS // starts[-1]))
    return TileSchedule(_upload(np.array(tiles, dtype=np.int32), device), rows, parts, whole)


def is_long(span: Span, window: int | None) -> bool:
    """Whether this is a whole document that dense_attention should have."""
    return span.past == 0 and span.keys >= LONG and (window is None or span.keys <= window)


def rows_for(rows: Sequence[int], groups: int) -> int:
    """Rows of a tile when the spans have so many: the larger, the fewer times a key is read."""
    if max(rows) <= SMALL:
        return SMALL
    large = sum(-(-each // LARGE) for each in rows) * groups
    return LARGE if max(rows) >= LARGE and large >= ENOUGH else MIDDLE


def parts_for(keys: Sequence[int], groups: int) -> int:
    """Parts of the longest tile, so that it is not what everyone waits for.

    >>> parts_for([8192], 3), parts_for([500] * 100, 3), parts_for([8192, *[500] * 100], 3)
    (64, 1, 8)
    """
    share = max(LEAST, sum(keys) * groups // ENOUGH)
    return next((parts for parts in PARTS if parts * share >= max(keys)), PARTS[-1])


def cut(span: Span, out: int, queries: int) -> Iterator[QueryTile]:
    """
    >>> [*cut(Span(query=7, queries=3, key=90, keys=10), out=2, queries=2)]
    [QueryTile(query=7, out=2, key=90, queries=2, seen=8), QueryTile(query=9, out=4, key=90, queries=1, seen=10)]
    """  # noqa: E501
    for start in range(0, span.queries, queries):
        count = min(queries, span.queries - start)
        yield QueryTile(span.query + start, out + start, span.key, count, span.past + start + 1)


def _upload(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy to the device asynchronously."""
    here = torch.from_numpy(values)
    if device.type != "cuda":
        return here.to(device)
    return here.pin_memory().to(device, non_blocking=True)
