"""MLA decode in latent space: few absorbed queries against all or selected latent KV entries.

    out[t, h] = sum_s softmax_s(scale * query[t, h] . row[s]) * row[s, :value]

query_THC absorbed queries, row_SC the latent KV entries (latent part, then rope part) shared by all
heads, spans saying which rows each query sees -> out_THV in query's dtype. Reads each cached row
once and expands none of them, which is why decoding uses it; with as many queries as keys the
expanded form (dense_attention) costs less. Softmax and sums in float32 or better, one chunk of
queries at a time.

`mla_paged_decode` is the same for many sequences at once: query_BQHC, row_SC the whole storage,
pages saying which of its rows each sequence has, visible_BQ how many of them each query sees (at
least one) -> out_BQHV. Rows of a sequence's pages beyond its own must be finite and are masked.

`mla_sparse_decode` attends to selected top-k tokens: query_NHC, N = B * Q, and index_NK, keys
counted within the sequence, -1 for none -> out_NHV. A query without keys gets zeros.

On a GPU halves use the Triton kernels in the last two: keys are split over programs, and there is
no host sync, so that a CUDA graph can capture them. They multiply probabilities as halves. The
first goes to sparse_mla there, with every key listed, unless the lists would be too long. On a CPU
all three read the storage in place where its kernels are loaded.
"""

from collections.abc import Sequence

from torch import Tensor

from paddock.kernels.block_table import BlockTable
from paddock.kernels.cpu import attention as cpu
from paddock.kernels.mla_decode import fused, reference
from paddock.kernels.spans import Span


def mla_decode(
    query_THC: Tensor, row_SC: Tensor, spans: Sequence[Span], *, scale: float, value: int
) -> Tensor:
    if _suits_cpu(query_THC, row_SC, value):
        row_S1C = row_SC.unsqueeze(1)
        return cpu.attend_spans(query_THC, row_S1C, row_S1C[..., :value], spans, scale=scale)
    listed = fused.suits(query_THC, row_SC, value) and fused.lists(spans)
    implementation = fused if listed else reference
    return implementation.mla_decode(query_THC, row_SC, spans, scale=scale, value=value)


def mla_paged_decode(
    query_BQHC: Tensor,
    row_SC: Tensor,
    pages: BlockTable,
    visible_BQ: Tensor,
    *,
    scale: float,
    value: int,
) -> Tensor:
    if _suits_cpu(query_BQHC, row_SC, value):
        sequences = cpu.CpuSequences.of_batch(pages, visible_BQ)
        out_THV = _attend_rows(query_BQHC.flatten(0, 1), row_SC, sequences, scale, value)
        return out_THV.unflatten(0, query_BQHC.shape[:2])
    implementation = fused if fused.suits(query_BQHC, row_SC, value) else reference
    return implementation.mla_paged_decode(
        query_BQHC, row_SC, pages, visible_BQ, scale=scale, value=value
    )


def mla_sparse_decode(
    query_NHC: Tensor,
    row_SC: Tensor,
    pages: BlockTable,
    index_NK: Tensor,
    *,
    scale: float,
    value: int,
) -> Tensor:
    if _suits_cpu(query_NHC, row_SC, value):
        sequences = cpu.CpuSequences.of_selection(pages.slot_mapping(index_NK))
        return _attend_rows(query_NHC, row_SC, sequences, scale, value)
    implementation = fused if fused.suits(query_NHC, row_SC, value) else reference
    return implementation.mla_sparse_decode(
        query_NHC, row_SC, pages, index_NK, scale=scale, value=value
    )


def _suits_cpu(query: Tensor, row_SC: Tensor, value: int) -> bool:
    return cpu.suits(query, row_SC, row_SC[..., :value])


def _attend_rows(
    query_THC: Tensor, row_SC: Tensor, sequences: cpu.CpuSequences, scale: float, value: int
) -> Tensor:
    row_S1C = row_SC.unsqueeze(1)
    return cpu.attend(query_THC, row_S1C, row_S1C[..., :value], sequences, scale=scale)


__all__ = ["mla_decode", "mla_paged_decode", "mla_sparse_decode"]
