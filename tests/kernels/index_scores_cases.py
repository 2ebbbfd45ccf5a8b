"""Cases of index scores over packed steps, and their results in Triton's interpreter.

    TRITON_INTERPRET=1 python -m tests.kernels.index_scores_cases FILE

Triton decides when it is imported whether it compiles or interprets, so interpreting needs a
separate process. T queries, S keys, H heads, D head dim.
"""

import sys
from dataclasses import dataclass

import torch

from paddock.kernels.block_table import BlockTable
from paddock.kernels.index_scores import IndexKeys
from paddock.kernels.index_scores.blocks import WIDTH, blocks
from paddock.kernels.spans import Span
from paddock.kernels.workspace import ACCELERATOR_SCRATCH_BYTES


def packed(*documents: tuple[int, int]) -> tuple[Span, ...]:
    """Spans of packed documents, each given as (past, new tokens)."""
    spans, query, key = [], 0, 0
    for past, queries in documents:
        spans.append(Span(query, queries, key, past + queries))
        query, key = query + queries, key + past + queries
    return tuple(spans)


@dataclass(frozen=True)
class Case:
    spans: tuple[Span, ...]
    k: int = 4
    heads: int = 3
    dim: int = 16
    scattered: bool = False  # keys are in slots of a larger cache
    scaled: bool = False
    budget: int = ACCELERATOR_SCRATCH_BYTES

    @property
    def queries(self) -> int:
        return sum(span.queries for span in self.spans)

    def inputs(
        self, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> tuple[torch.Tensor, IndexKeys, torch.Tensor]:
        """The same numbers on every device."""
        rng = torch.Generator().manual_seed(0)
        T = max(span.query + span.queries for span in self.spans)
        S = max(span.key + span.keys for span in self.spans)
        rows = 2 * S if self.scattered else S
        query = torch.randn(T, self.heads, self.dim, generator=rng)
        row = torch.randn(rows, self.dim, generator=rng)
        weight = torch.randn(T, self.heads, generator=rng) / self.heads
        slot = torch.randperm(rows, generator=rng)[:S] if self.scattered else None
        scale = torch.rand(rows, generator=rng) + 0.5 if self.scaled else None
        keys = IndexKeys(
            row.to(dtype).to(device),
            None if slot is None else slot.to(device),
            None if scale is None else scale.to(device),
        )
        return query.to(dtype).to(device), keys, weight.to(device)


CASES = {
    "one document": Case(packed((0, 150))),
    "packed documents, tiles that are not full": Case(packed((0, 70), (0, 1), (0, 129), (0, 64))),
    "a past": Case(packed((300, 70)), k=20),
    "decoding": Case(packed((200, 1), (5, 1), (129, 2), (600, 1))),
    "decode with prefill": Case(packed((200, 1), (0, 130), (40, 1), (10, 9))),
    "slots": Case(packed((100, 66), (300, 1)), scattered=True),
    "scales": Case(packed((0, 80), (140, 3)), scaled=True),
    "slots and scales": Case(packed((0, 80), (140, 3)), scattered=True, scaled=True),
    "dims that fill no tile": Case(packed((30, 70), (30, 2)), heads=5, dim=20),
    "more tiles than a group": Case(packed(*[(3, 9)] * 34, (0, 70)), heads=1),
    "little scratch": Case(packed((0, 200), (0, 130), (90, 1)), budget=1 << 16),
}


def scored(case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    """Triton's scores, a row per query; entries not written are NaN. [queries, widest block]"""
    from paddock.kernels.index_scores.triton import scores

    inputs = case.inputs(dtype, device)
    plan = blocks(case.spans, case.k, torch.device(device), case.budget)
    widest = max(block.width for block in plan)
    found = torch.full((case.queries, widest), float("nan"), device=device)
    for block in plan:
        out = torch.full(block.shape, float("nan"), device=device)
        scores(*inputs, block, out)
        found[block.rows, : block.width] = out
    return found


def rows_of(spans):
    """Query, first key and number of keys of every row of the result."""
    for span in spans:
        for i in range(span.queries):
            yield span.query + i, span.key, span.past + i + 1


@dataclass(frozen=True)
class Table:
    """A decode step: sequences of different lengths, their keys scattered over a KV cache."""

    visible_BQ: tuple[tuple[int, ...], ...]
    columns: int
    k: int = 4
    heads: int = 3
    dim: int = 16
    scaled: bool = False
    size: int = 1  # keys per page

    def inputs(self, dtype: torch.dtype = torch.float32, device: str = "cpu"):
        """query_NHD, keys, weight_NH, pages, visible_BQ. Unused pages point at NaN."""
        rng = torch.Generator().manual_seed(0)
        B, Q, M = len(self.visible_BQ), len(self.visible_BQ[0]), self.columns
        query = torch.randn(B * Q, self.heads, self.dim, generator=rng)
        P = -(-M // self.size)
        row = torch.randn((B * P + 1) * self.size, self.dim, generator=rng)
        row[-self.size :] = float("nan")
        weight = torch.randn(B * Q, self.heads, generator=rng) / self.heads
        scale = torch.rand(len(row), generator=rng) + 0.5 if self.scaled else None
        visible = torch.tensor(self.visible_BQ)
        page = torch.randperm(B * P, generator=rng).view(B, P)
        page[torch.arange(P) * self.size >= visible.amax(1, keepdim=True)] = B * P
        pages = BlockTable(page.to(device), self.size)
        keys = IndexKeys(
            row.to(dtype).to(device), None, None if scale is None else scale.to(device)
        )
        return query.to(dtype).to(device), keys, weight.to(device), pages, visible.to(device)

    def as_spans(self, keys: IndexKeys, pages: BlockTable) -> tuple[IndexKeys, tuple[Span, ...]]:
        """Each query as one span."""
        spans = tuple(
            Span(b * len(row) + q, 1, b * pages.max_keys, visible)
            for b, row in enumerate(self.visible_BQ)
            for q, visible in enumerate(row)
        )
        return IndexKeys(keys.row_SD, pages.slot_BM.reshape(-1), keys.scale_S), spans


TABLES = {
    "one query each": Table(((600,), (3,), (130,), (1,)), columns=640),
    "drafts": Table(((20, 21, 22), (298, 299, 300)), columns=300),
    "scaled": Table(((150,), (40,)), columns=200, scaled=True),
    "pages": Table(((600,), (3,), (130,), (1,)), columns=640, size=16),
    "drafts in large pages": Table(((20, 21), (298, 299)), columns=300, size=64, scaled=True),
}


def table_scored(table: Table, dtype: torch.dtype = torch.float32, device: str = "cpu"):
    from paddock.kernels.index_scores.triton import table_scores

    query, keys, weight, pages, visible = table.inputs(dtype, device)
    width = -(-pages.max_keys // WIDTH) * WIDTH
    out = torch.full((len(query), width), float("nan"), device=device)
    table_scores(query, keys, weight, pages, visible.int(), table.k, out)
    return out


if __name__ == "__main__":
    found = {name: scored(case) for name, case in CASES.items()}
    found |= {name: table_scored(table) for name, table in TABLES.items()}
    torch.save(found, sys.argv[1])
