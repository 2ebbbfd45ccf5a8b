"""Reference of sparse MLA.

T queries, H heads, C row width, V value columns of it, S rows, K selected per query, Q a chunk of
T.
"""

from typing import Any

import torch
from torch import Tensor

from paddock.kernels.precision import opmath_dtype
from paddock.kernels.workspace import chunks, scratch_bytes

# Gathered rows are used twice forward and four times backward, so a larger chunk pays here.
SCRATCHES = 4


def sparse_mla(
    query_THC: Tensor, row_SC: Tensor, index_TK: Tensor, *, scale: float, value: int
) -> Tensor:
    """[T, H, value] in the query's dtype; see the package's contract."""
    if not torch.is_grad_enabled():
        return _attend(query_THC, row_SC, index_TK, scale, value)
    return _SparseMLA.apply(query_THC, row_SC, index_TK, scale, value)  # type: ignore[no-any-return]


def _attend(
    query_THC: Tensor, row_SC: Tensor, index_TK: Tensor, scale: float, value: int
) -> Tensor:
    pieces = []
    for q in _chunks(row_SC, index_TK):
        prob_QHK, gathered_QKC = _probabilities(query_THC[q], row_SC, index_TK[q], scale)
        pieces.append((prob_QHK @ gathered_QKC[..., :value]).to(query_THC.dtype))
    if not pieces:
        return query_THC.new_empty(*query_THC.shape[:2], value)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class _SparseMLA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query_THC: Tensor, row_SC: Tensor, index_TK: Tensor, scale: float, value: int
    ) -> Tensor:
        out_THV = _attend(query_THC, row_SC, index_TK, scale, value)
        ctx.save_for_backward(query_THC, row_SC, index_TK)
        ctx.scale, ctx.value = scale, value
        return out_THV

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """With p the probabilities and g the output's gradient:
        dp = g . value_rows,  ds = p (dp - sum_k p dp),  dquery = scale ds . rows,
        drow[k] = sum_h scale ds query, plus p g on the value columns.
        """
        (grad_THV,) = grads
        query_THC, row_SC, index_TK = ctx.saved_tensors
        dquery_THC = torch.empty_like(query_THC)
        drow_SC = torch.zeros_like(row_SC, dtype=opmath_dtype(row_SC.dtype))
        for q in _chunks(row_SC, index_TK):
            prob_QHK, gathered_QKC = _probabilities(query_THC[q], row_SC, index_TK[q], ctx.scale)
            grad_QHV = grad_THV[q].to(prob_QHK.dtype)
            dprob_QHK = grad_QHV @ gathered_QKC[..., : ctx.value].mT
            mean_QH1 = (prob_QHK * dprob_QHK).sum(-1, keepdim=True)
            dscore_QHK = ctx.scale * prob_QHK * (dprob_QHK - mean_QH1)
            dquery_THC[q] = (dscore_QHK @ gathered_QKC).to(dquery_THC.dtype)
            dgathered_QKC = dscore_QHK.mT @ query_THC[q].to(dscore_QHK.dtype)
            dgathered_QKC[..., : ctx.value] += prob_QHK.mT @ grad_QHV
            # Padding points at row 0 with probability zero, so it adds zeros.
            drow_SC.index_add_(0, index_TK[q].clamp(min=0).flatten(), dgathered_QKC.flatten(0, 1))
        return dquery_THC, drow_SC.to(row_SC.dtype), None, None, None


def _chunks(row_SC: Tensor, index_TK: Tensor) -> Any:
    T, K = index_TK.shape
    row_bytes = K * row_SC.shape[1] * opmath_dtype(row_SC.dtype).itemsize
    return chunks(T, row_bytes, SCRATCHES * scratch_bytes(row_SC.device))


def _probabilities(
    query_QHC: Tensor, row_SC: Tensor, index_QK: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention over the gathered rows, and the rows; both in float32 or better."""
    gathered_QKC = row_SC.index_select(0, index_QK.clamp(min=0).flatten())
    gathered_QKC = gathered_QKC.view(*index_QK.shape, -1).to(opmath_dtype(row_SC.dtype))
    score_QHK = (query_QHC.to(gathered_QKC.dtype) * scale) @ gathered_QKC.mT
    missing_Q1K = (index_QK < 0).unsqueeze(1)
    if not bool(missing_Q1K.any()):  # often: queries with few keys are attended densely
        return score_QHK.softmax(-1), gathered_QKC
    prob_QHK = score_QHK.masked_fill_(missing_Q1K, float("-inf")).softmax(-1)
    # Once more, for queries without any key: a softmax over nothing is NaN.
    return prob_QHK.masked_fill(missing_Q1K, 0.0), gathered_QKC
