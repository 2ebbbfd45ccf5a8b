"""Tiling of chunked prefill: query tiles, and splits of their keys.

A tile is a few neighbouring queries of one span with all heads that share a key head. Lengths are
known here, unlike in a decode batch, so that the work of tiles can be balanced.
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
LEAST = 256  # minimum keys per split
PARTS = (1, 8, 64)  # numbers of splits: few, since each is compiled separately
MAX_PARTIAL_SUMS = 1 << 14  # splits times queries: each stores a partial sum per head
# Whole documents of at least this many tokens use dense_attention.
LONG = 1024


class QueryTile(NamedTuple):
    """Queries [query, query + queries) see keys from `key` on, the first of them `seen` keys and
    each of the others one more; their outputs go to rows from `out` on."""

    query: int
    out: int
    key: int
    queries: int
    seen: int

    def num_keys(self, window: int | None) -> int:
        """Number of keys that any of its queries sees."""
        last = self.seen + self.queries - 1
        return last if window is None else min(last, window + self.queries - 1)


class TileSchedule(NamedTuple):
    """Tiles of one launch, and the documents left to dense_attention."""

    table: Tensor | None  # [tiles, 5] int32, those with the most keys first; None without any
    rows: int
    parts: int
    whole: tuple[tuple[int, Span], ...]  # long documents, each with its first output row


@lru_cache(maxsize=16)
def plan(
    spans: tuple[Span, ...], group: int, groups: int, window: int | None, device: torch.device
) -> TileSchedule:
    """Tiles for `groups` key heads of `group` heads each. Cached for the layers of a step."""
    starts = np.cumsum([0, *(span.queries for span in spans)]).tolist()
    placed = [*zip(starts, spans, strict=False)]
    whole = tuple((out, span) for out, span in placed if is_long(span, window))
    placed = [(out, span) for out, span in placed if not is_long(span, window)]
    if not placed:
        return TileSchedule(None, 0, 0, whole)
    rows = rows_for([span.queries * group for _, span in placed], groups)
    tiles = [tile for out, span in placed for tile in cut(span, out, rows // group)]
    tiles.sort(key=lambda tile: -tile.num_keys(window))
    parts = parts_for([tile.num_keys(window) for tile in tiles], groups)
    parts = max(
        each for each in PARTS if each == 1 or each <= min(parts, MAX_PARTIAL_SUMS // starts[-1])
    )
    return TileSchedule(_upload(np.array(tiles, dtype=np.int32), device), rows, parts, whole)


def is_long(span: Span, window: int | None) -> bool:
    """Whether this is a whole document long enough for dense_attention."""
    return span.past == 0 and span.keys >= LONG and (window is None or span.keys <= window)


def rows_for(rows: Sequence[int], groups: int) -> int:
    """Rows per tile for spans of so many rows: larger tiles read each key fewer times."""
    if max(rows) <= SMALL:
        return SMALL
    large = sum(-(-each // LARGE) for each in rows) * groups
    return LARGE if max(rows) >= LARGE and large >= ENOUGH else MIDDLE


def parts_for(keys: Sequence[int], groups: int) -> int:
    """Number of key splits, so that the longest tile does not dominate the time.

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
    host = torch.from_numpy(values)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
