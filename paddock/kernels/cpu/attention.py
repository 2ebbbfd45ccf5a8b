"""CPU attention: keys and values are read where they are stored, through a block table.

T queries, H heads, G key heads, D query/key dim, V value dim, S storage slots, B sequences.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paddock.kernels import cpu
from paddock.kernels.block_table import BlockTable
from paddock.kernels.spans import Span

_last_step = threading.local()


@dataclass(frozen=True, slots=True, eq=False)
class CpuSequences:
    """First query, number of queries and of keys of each sequence [3, B], and their slots. The last
    query sees all keys, each one before it one key less."""

    sizes_3B: Tensor
    pages: BlockTable

    @classmethod
    def of_batch(cls, pages: BlockTable, visible_BQ: Tensor) -> "CpuSequences":
        """The sequences of a decode batch; all layers of a step get the same object."""
        cached = pages.__dict__.get("_cpu_sequences")
        if cached is not None and cached[0] is visible_BQ:
            return cached[1]  # type: ignore[no-any-return]
        B, Q = visible_BQ.shape
        sizes_3B = torch.empty(3, B, dtype=torch.int64)
        torch.arange(0, B * Q, Q, out=sizes_3B[0])
        sizes_3B[1] = Q
        sizes_3B[2] = visible_BQ[:, -1]
        page_BP = pages.page_BP.to(torch.int64).contiguous()
        sequences = cls(sizes_3B, BlockTable(page_BP, pages.page_size))
        pages.__dict__["_cpu_sequences"] = (visible_BQ, sequences)
        return sequences

    @classmethod
    def of_spans(cls, spans: Sequence[Span], slot_S: Tensor | None) -> "CpuSequences":
        """The spans of a packed step; key s is in slot slot_S[s], or s. The last answer is kept:
        all layers of a step ask alike."""
        spans = tuple(spans)
        last = getattr(_last_step, "sequences", None)
        if last is not None and last[0] == spans and last[1] is slot_S:
            return last[2]  # type: ignore[no-any-return]
        sizes_3B = torch.tensor([(s.query, s.queries, s.keys) for s in spans]).T.contiguous()
        page_BP = torch.zeros(len(spans), max(span.keys for span in spans), dtype=torch.int64)
        for b, span in enumerate(spans):
            keys = span.key_slice
            row = torch.arange(keys.start, keys.stop) if slot_S is None else slot_S[keys]
            page_BP[b, : span.keys] = row
        sequences = cls(sizes_3B, BlockTable(page_BP, 1))
        _last_step.sequences = (spans, slot_S, sequences)
        return sequences

    @classmethod
    def of_selection(cls, slot_TK: Tensor) -> "CpuSequences":
        """Queries with selected keys each: slots, and -1 for none."""
        T = len(slot_TK)
        if bool(((slot_TK[:, 1:] >= 0) & (slot_TK[:, :-1] < 0)).any()):  # padding in between
            slot_TK = slot_TK.sort(-1, descending=True).values
        count_T = (slot_TK >= 0).sum(-1)
        sizes_3B = torch.stack((torch.arange(T), torch.ones(T, dtype=torch.int64), count_T))
        return cls(sizes_3B, BlockTable(slot_TK.to(torch.int64).contiguous(), 1))

    def arguments(self) -> tuple[int, ...]:
        """As the kernels take them; valid while self is."""
        query_B, queries_B, keys_B = self.sizes_3B
        page_BP = self.pages.page_BP
        assert page_BP.dtype == torch.int64 and page_BP.is_contiguous()
        return (
            *(len(query_B), query_B.data_ptr(), queries_B.data_ptr(), keys_B.data_ptr()),
            *(page_BP.data_ptr(), page_BP.shape[1], self.pages.page_size),
        )


@dataclass(frozen=True, slots=True, eq=False)
class SelectedKeys:
    """[T, K] keys that each query attends to, -1 for none, counted from each sequence's first key
    [B]; a row that begins with -1: all that the query sees."""

    index_TK: Tensor
    first_B: Tensor

    @classmethod
    def of(cls, index_TK: Tensor, spans: Sequence[Span]) -> "SelectedKeys":
        return cls(index_TK.int().contiguous(), torch.tensor([span.key for span in spans]))

    def arguments(self) -> tuple[int, ...]:
        return self.index_TK.data_ptr(), self.index_TK.shape[1], self.first_B.data_ptr()


def suits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return query.numel() > 0 and cpu.suits(query, key, value)


def attend(  # noqa: PLR0913  keys and values apart
    query_THD: Tensor,
    key_SGD: Tensor,
    value_SGV: Tensor,
    sequences: CpuSequences,
    *,
    scale: float,
    window: int | None = None,
    selected: SelectedKeys | None = None,
) -> Tensor:
    """[T, H, V]; a query without keys gets zeros."""
    (T, H, D), (_, G, V) = query_THD.shape, value_SGV.shape
    query_THD = query_THD if query_THD.stride(1) == D else query_THD.contiguous()
    out_THV = query_THD.new_empty(T, H, V)
    cpu.function("attention", query_THD.dtype)(
        *sequences.arguments(),
        *((None, 0, None) if selected is None else selected.arguments()),
        *(H, G, D, V, scale, window or 0),
        *(query_THD.data_ptr(), query_THD.stride(0)),
        *(key_SGD.data_ptr(), key_SGD.stride(0), key_SGD.stride(1)),
        *(value_SGV.data_ptr(), value_SGV.stride(0), value_SGV.stride(1)),
        out_THV.data_ptr(),
    )
    return out_THV


def attend_spans(  # noqa: PLR0913  keys and values apart
    query_THD: Tensor,
    key_SGD: Tensor,
    value_SGV: Tensor,
    spans: Sequence[Span],
    *,
    scale: float,
    window: int | None = None,
    slot_S: Tensor | None = None,
    index_TK: Tensor | None = None,
) -> Tensor:
    """[N, H, V], the queries in the order of the spans. With `index_TK` they attend to these keys,
    or to all that they see where a row begins with -1."""
    sequences = CpuSequences.of_spans(spans, slot_S)
    selected = None if index_TK is None else SelectedKeys.of(index_TK, spans)
    out_THV = attend(
        query_THD, key_SGD, value_SGV, sequences, scale=scale, window=window, selected=selected
    )
    starts = [span.query for span in spans]
    covered = sum(span.queries for span in spans)
    if starts == sorted(starts) and covered == len(out_THV):
        return out_THV
    return torch.cat([out_THV[span.query_slice] for span in spans])
