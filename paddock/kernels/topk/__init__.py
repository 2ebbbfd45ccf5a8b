"""Deterministic top-k selection of keys by index score.

    topk(score_TS, visible_T, k)                                -> index_TK  int32
    index_topk(query_THD, key_SD, weight_TH, past, k)           -> index_TK  int32
    index_topk_varlen(query_THD, keys, weight_TH, spans, k)     -> index_QK  int32
    index_topk_paged(query_NHD, keys, weight_NH, pages, visible_BQ, k)  -> index_NK  int32

Query t sees keys [0, visible_T[t]). The k best by float32 score are selected; of equal scores the
lowest index wins; the result is ascending and padded with -1 at the end where fewer than k keys are
visible. NaN counts as -inf. The rule determines the result completely, so training, serving,
reference and kernel agree: `torch.topk` alone does not (its order among ties is undefined, and
-0.0 ties with 0.0).

`index_topk` scores (see index_scores) and selects chunk by chunk; query t sees past + t + 1 keys.
`index_topk_varlen` does so for a whole packed step at once, training, prefill or decode: a row for
every query of `spans`, in their order, and keys counted over all of them (a span's first key is
span.key). `keys` are rows, possibly scattered over a storage, possibly scaled 8-bit ones.
`index_topk_paged` serves a decode step: B sequences of Q queries each, N = B * Q; `pages`
says which row of `keys` each key of a sequence is, and query q of sequence b sees the first
visible_BQ[b, q] of them. Keys are counted within the sequence. It never syncs with the host, so
that a CUDA graph can capture it.
Nothing here is differentiable.

On an NVIDIA GPU one launch scores a block of queries of many documents (Triton), one selects (CUDA
C++), and only that block's scores exist. They are rounded in another order than the reference's, so
keys that differ by less than rounding may be ranked differently; on equal scores both select
the same keys. The CPU kernels, where they are loaded, do the same without
gathering keys. Without Triton or NVRTC, for float64 and for k above 4096 the reference is used.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paddock.kernels.block_table import BlockTable
from paddock.kernels.index_scores.reference import IndexKeys
from paddock.kernels.spans import Span

from . import cpu, cuda, fused, reference
from .reference import topk_indices


def topk(score_TS: Tensor, visible_T: Tensor, k: int) -> Tensor:
    T, S = score_TS.shape
    if S == 0 or not cuda.suits(score_TS.device, S, k):
        return reference.topk(score_TS, visible_T, k)
    score_TS = score_TS.detach().float()
    score_TS = score_TS if score_TS.stride(1) == 1 else score_TS.contiguous()
    visible_T = visible_T.clamp(max=S).int().contiguous()
    index_TK = torch.empty((T, k), dtype=torch.int32, device=score_TS.device)
    return cuda.topk(score_TS, visible_T, k, start_T=None, out_TK=index_TK)


def index_topk(query_THD: Tensor, key_SD: Tensor, weight_TH: Tensor, past: int, k: int) -> Tensor:
    T = len(query_THD)
    spans = [Span(0, T, 0, past + T)] if T else []
    return index_topk_varlen(query_THD, IndexKeys(key_SD), weight_TH, spans, k)


def index_topk_varlen(
    query_THD: Tensor, keys: IndexKeys, weight_TH: Tensor, spans: Sequence[Span], k: int
) -> Tensor:
    if spans and keys.scale_S is None and cpu.suits(query_THD, keys.row_SD):
        return cpu.index_topk_varlen(query_THD, keys, weight_TH, spans, k)
    longest = max((span.keys for span in spans), default=0)
    implementation = fused if longest and fused.suits(query_THD, keys, longest, k) else reference
    return implementation.index_topk_varlen(query_THD, keys, weight_TH, spans, k)


def index_topk_paged(
    query_NHD: Tensor,
    keys: IndexKeys,
    weight_NH: Tensor,
    pages: BlockTable,
    visible_BQ: Tensor,
    k: int,
) -> Tensor:
    assert keys.slot_S is None
    if keys.scale_S is None and cpu.suits(query_NHD, keys.row_SD):
        return cpu.index_topk_paged(query_NHD, keys, weight_NH, pages, visible_BQ, k)
    implementation = fused if fused.suits(query_NHD, keys, pages.max_keys, k) else reference
    return implementation.index_topk_paged(query_NHD, keys, weight_NH, pages, visible_BQ, k)


__all__ = ["index_topk", "index_topk_paged", "index_topk_varlen", "topk", "topk_indices"]
