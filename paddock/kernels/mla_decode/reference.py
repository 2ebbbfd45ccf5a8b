"""Reference of absorbed MLA attention.

T queries, H heads, C row width, V value columns of it, S rows, Q a chunk of T; in a decode batch B
sequences, Q queries each, M maximum rows, N a chunk of B.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paddock.kernels.block_table import BlockTable
from paddock.kernels.precision import opmath_dtype
from paddock.kernels.spans import Span
from paddock.kernels.sparse_mla import reference as sparse
from paddock.kernels.workspace import chunks, scratch_bytes


def mla_decode(
    query_THC: Tensor, row_SC: Tensor, spans: Sequence[Span], *, scale: float, value: int
) -> Tensor:
    """[T, H, value], rows in the order of the spans' queries; see the package's contract."""
    pieces = [
        piece
        for span in spans
        for piece in _attend(query_THC[span.query_slice], row_SC[span.key_slice], scale, value)
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _attend(query_NHC: Tensor, row_SC: Tensor, scale: float, value: int) -> Iterator[Tensor]:
    """The N queries of one span, chunk by chunk."""
    N, H, _ = query_NHC.shape
    S = row_SC.shape[0]
    row_SC = row_SC.to(opmath_dtype(row_SC.dtype))
    visible_N = torch.arange(S - N + 1, S + 1, device=row_SC.device)
    for q in chunks(N, H * S * row_SC.dtype.itemsize, scratch_bytes(row_SC.device)):
        seen_SC = row_SC[: S - N + q.stop]
        score_QHS = (query_NHC[q].to(row_SC.dtype) * scale) @ seen_SC.mT
        hidden_QS = torch.arange(len(seen_SC), device=row_SC.device) >= visible_N[q].unsqueeze(1)
        prob_QHS = score_QHS.masked_fill(hidden_QS.unsqueeze(1), float("-inf")).softmax(-1)
        yield (prob_QHS @ seen_SC[:, :value]).to(query_NHC.dtype)


def mla_paged_decode(
    query_BQHC: Tensor,
    row_SC: Tensor,
    pages: BlockTable,
    visible_BQ: Tensor,
    *,
    scale: float,
    value: int,
) -> Tensor:
    """[B, Q, H, value] in the query's dtype; see the package's contract."""
    (B, Q, H, C), slot_BM = query_BQHC.shape, pages.slot_BM
    M, dtype = slot_BM.shape[1], opmath_dtype(row_SC.dtype)
    hidden_BQM = torch.arange(M, device=row_SC.device) >= visible_BQ.unsqueeze(-1)
    out_BQHV = query_BQHC.new_empty(B, Q, H, value)
    for n in chunks(B, (C + Q * H) * M * dtype.itemsize, scratch_bytes(row_SC.device)):
        row_NMC = row_SC.index_select(0, slot_BM[n].flatten()).view(-1, M, C).to(dtype)
        score_NXM = (query_BQHC[n].flatten(1, 2).to(dtype) * scale) @ row_NMC.mT
        score_NQHM = score_NXM.unflatten(1, (Q, H))
        score_NQHM.masked_fill_(hidden_BQM[n].unsqueeze(2), float("-inf"))
        prob_NXM = score_NQHM.softmax(-1).flatten(1, 2)
        out_BQHV[n] = (prob_NXM @ row_NMC[..., :value]).unflatten(1, (Q, H)).to(out_BQHV.dtype)
    return out_BQHV


def mla_sparse_decode(
    query_NHC: Tensor,
    row_SC: Tensor,
    pages: BlockTable,
    index_NK: Tensor,
    *,
    scale: float,
    value: int,
) -> Tensor:
    """[N, H, value] in the query's dtype; see the package's contract."""
    slot_NK = pages.slot_mapping(index_NK)
    return sparse.sparse_mla(query_NHC, row_SC, slot_NK, scale=scale, value=value)
