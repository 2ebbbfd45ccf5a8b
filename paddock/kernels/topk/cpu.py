"""Top-k keys by index score with the CPU kernels.

T queries, S keys, H index heads, D index head dim, K selected; of a batch B sequences, Q queries
each, N = B * Q.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paddock.kernels import cpu
from paddock.kernels.block_table import BlockTable
from paddock.kernels.cpu.attention import CpuSequences
from paddock.kernels.index_scores.reference import IndexKeys
from paddock.kernels.spans import Span

from .reference import PAD


def suits(query_THD: Tensor, row_SD: Tensor) -> bool:
    return len(query_THD) > 0 and cpu.suits(query_THD, row_SD)


def index_topk_varlen(
    query_THD: Tensor, keys: IndexKeys, weight_TH: Tensor, spans: Sequence[Span], k: int
) -> Tensor:
    """[Q, K], a row for every query of the spans, in their order."""
    sequences = CpuSequences.of_spans(spans, keys.slot_S)
    index_TK = _select(query_THD, keys.row_SD, weight_TH, sequences, k)
    pieces = [index_TK[span.query_slice] for span in spans]
    return torch.cat(
        [
            torch.where(piece == PAD, PAD, piece + span.key)
            for piece, span in zip(pieces, spans, strict=True)
        ]
    )


def index_topk_paged(
    query_NHD: Tensor,
    keys: IndexKeys,
    weight_NH: Tensor,
    pages: BlockTable,
    visible_BQ: Tensor,
    k: int,
) -> Tensor:
    """[N, K], keys counted within the sequence."""
    sequences = CpuSequences.of_batch(pages, visible_BQ)
    return _select(query_NHD, keys.row_SD, weight_NH, sequences, k)


def _select(
    query_THD: Tensor, key_SD: Tensor, weight_TH: Tensor, sequences: CpuSequences, k: int
) -> Tensor:
    T, H, D = query_THD.shape
    query_THD, weight_TH = query_THD.contiguous(), weight_TH.float().contiguous()
    assert key_SD.stride(0) == D
    index_TK = torch.empty(T, k, dtype=torch.int32)
    cpu.function("index_topk", query_THD.dtype)(
        *sequences.arguments(),
        *(H, D, query_THD.data_ptr(), weight_TH.data_ptr(), key_SD.data_ptr()),
        *(k, index_TK.data_ptr()),
    )
    return index_TK
