"""Blocks of queries scored in one launch, in bounded scratch memory.

The scores of a block of queries are stored in a rectangle of scratch memory: a row per query, a
column per key of the query's own document, counted from that document's first key. So short
documents need no wider rectangle than the longest of them, and one launch scores many of them.
Within a block the work is split into tiles: neighbouring queries of one span.

N tiles, R rows (the queries of all spans, in the spans' order).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from paddock.kernels.spans import Span

WIDTH = 128  # the length of a row of scores is a multiple of this
# Up to here queries are scored one by one, which reads their keys once for each of them; beyond, by
# tiles of MANY, which multiplies as if the tile were full.
FEW, MANY = 8, 64
FIELDS = 8  # query, queries, key, keys, row in the block; padded to 32 bytes


@dataclass(frozen=True, slots=True, eq=False)
class ScoreBlock:
    """Rows [rows.start, rows.stop) of the result, scored and selected in one launch."""

    rows: slice
    width: int
    few: bool  # its tiles hold one query each
    tile_N8: Tensor
    visible_R: Tensor  # how many keys each row of the block sees
    start_R: Tensor  # index of the first of them among all keys

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.width

    @property
    def rows_wide(self) -> int:
        """Number of scores in its rectangle."""
        return (self.rows.stop - self.rows.start) * self.width


@lru_cache(maxsize=8)  # the same for every layer of a step
def blocks(
    spans: tuple[Span, ...], k: int, device: torch.device, budget: int
) -> tuple[ScoreBlock, ...]:
    """Cover the queries of `spans`, in order, with blocks whose scores fit in `budget` bytes (or
    that are a single tile). Queries with at most `k` keys select all of them and are not scored.
    """
    found: list[ScoreBlock] = []
    row = 0
    for few, group in groupby(spans, key=lambda span: span.queries <= FEW):
        tiles = _tiles(list(group), 1 if few else MANY)
        for cut in _cuts(tiles, budget):
            found.append(_block(tiles[cut], row, few, k, device))
            row = found[-1].rows.stop
    return tuple(found)


def _tiles(spans: Sequence[Span], size: int) -> np.ndarray:
    """Query, queries, key and keys (that the last query sees) of every tile, [N, 4]."""
    return np.array(
        [
            (span.query + at, count, span.key, span.past + at + count)
            for span in spans
            for at in range(0, span.queries, size)
            for count in [min(size, span.queries - at)]
        ]
    )


def _cuts(tile_N4: np.ndarray, budget: int) -> Iterator[slice]:
    """Runs of tiles whose rectangle fits in the budget, at least one tile each."""
    start = rows = width = 0
    for n, (_, count, _, keys) in enumerate(tile_N4.tolist()):
        wider = max(width, _padded_width(keys))
        if rows and 4 * (rows + count) * wider > budget:
            yield slice(start, n)
            start, rows, wider = n, 0, _padded_width(keys)
        rows, width = rows + count, wider
    yield slice(start, len(tile_N4))


def _padded_width(keys: int) -> int:
    return -(-keys // WIDTH) * WIDTH


def _block(tile_N4: np.ndarray, row: int, few: bool, k: int, device: torch.device) -> ScoreBlock:
    count_N, key_N, keys_N = tile_N4[:, 1], tile_N4[:, 2], tile_N4[:, 3]
    first_N = np.cumsum(count_N) - count_N
    rows = int(count_N.sum())
    table_N8 = np.zeros((len(tile_N4), FIELDS), np.int32)
    table_N8[:, :4] = tile_N4
    table_N8[:, 3] = np.where(keys_N > k, keys_N, 0)
    table_N8[:, 4] = first_N
    within_R = np.arange(rows) - np.repeat(first_N, count_N)
    visible_R = np.repeat(keys_N - count_N + 1, count_N) + within_R
    start_R = np.repeat(key_N, count_N)
    tables_and_rows = np.concatenate((table_N8.reshape(-1), visible_R, start_R)).astype(np.int32)
    uploaded = torch.from_numpy(tables_and_rows).to(device)  # one copy
    tables, visible, start = uploaded.split([table_N8.size, rows, rows])
    width = _padded_width(int(keys_N.max()))
    tile_N8 = tables.view(-1, FIELDS)
    return ScoreBlock(slice(row, row + rows), width, few, tile_N8, visible, start)
