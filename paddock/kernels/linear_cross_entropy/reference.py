"""Reference of linear cross-entropy.

T tokens, K tokens with a target, R rows of one chunk, D hidden dim, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paddock.kernels.precision import mm_fp32, opmath_dtype
from paddock.kernels.workspace import chunks

CHUNK_BYTES = 1 << 28
SAVED_BYTES = 1 << 24  # probabilities up to this size are saved for backward instead of recomputed


def nll(
    hidden_TD: Tensor, head_VD: Tensor, target_T: Tensor, temperature: float, chunk_bytes: int
) -> Tensor:
    """Negative log-likelihood of each target; see the package's contract."""
    return _NegLogLikelihood.apply(  # type: ignore[no-any-return]
        hidden_TD, head_VD, target_T, temperature, chunk_bytes
    )


class _NegLogLikelihood(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        head_VD: Tensor,
        target_T: Tensor,
        temperature: float,
        chunk_bytes: int,
    ) -> Tensor:
        dtype = _logit_dtype(hidden_TD, head_VD)
        nll_T = hidden_TD.new_zeros(len(target_T), dtype=dtype)
        lse_T = torch.zeros_like(nll_T)
        saved: list[Tensor] = []
        saves = nll_T.nbytes * len(head_VD) <= SAVED_BYTES <= chunk_bytes
        for rows_R in _target_chunks(target_T, len(head_VD) * dtype.itemsize, chunk_bytes):
            logit_RV = _logits(hidden_TD[rows_R], head_VD, temperature)
            picked_R = logit_RV.gather(1, target_T[rows_R, None]).squeeze(1)
            lse_R, sum_R1 = _logsumexp_(logit_RV)
            saved += [logit_RV.div_(sum_R1)] if saves else []
            lse_T[rows_R] = lse_R
            nll_T[rows_R] = lse_R - picked_R
        ctx.save_for_backward(hidden_TD, head_VD, target_T, lse_T, *saved)
        ctx.temperature, ctx.chunk_bytes = temperature, chunk_bytes
        return nll_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, head_VD, target_T, lse_T, *saved = ctx.saved_tensors
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        dtype = _logit_dtype(hidden_TD, head_VD)
        # Tensor cores multiply halves: there the gradient is rounded like any activation's.
        narrow = hidden_TD.dtype if hidden_TD.is_cuda else dtype
        grad_hidden_TD = torch.zeros_like(hidden_TD) if wants_hidden else None
        # Sums over chunks, so it must not round to half between them.
        grad_head_VD = torch.zeros_like(head_VD, dtype=dtype) if wants_head else None
        for rows_R in _target_chunks(target_T, len(head_VD) * dtype.itemsize, ctx.chunk_bytes):
            hidden_RD = hidden_TD[rows_R]
            # d nll / d logit = (softmax - one hot), in the buffer of the logits themselves.
            if saved:
                grad_RV = saved[0].clone()
            else:
                logit_RV = _logits(hidden_RD, head_VD, ctx.temperature)
                grad_RV = logit_RV.sub_(lse_T[rows_R, None]).exp_()
            grad_RV[torch.arange(len(rows_R), device=rows_R.device), target_T[rows_R]] -= 1
            grad_RV *= grad_T[rows_R, None] / ctx.temperature
            grad_RV = grad_RV.to(narrow)
            if grad_hidden_TD is not None:
                grad_hidden_TD[rows_R] = (grad_RV @ head_VD.to(narrow)).to(hidden_TD.dtype)
            if grad_head_VD is not None:
                grad_head_VD += mm_fp32(grad_RV.T, hidden_RD.to(narrow))
        if grad_head_VD is not None:
            grad_head_VD = grad_head_VD.to(head_VD.dtype)
        return grad_hidden_TD, grad_head_VD, None, None, None


def _target_chunks(target_T: Tensor, row_bytes: int, chunk_bytes: int) -> Iterator[Tensor]:
    """Indices of the tokens with a target, as many at a time as `chunk_bytes` of logits allow."""
    index_K = (target_T >= 0).nonzero().squeeze(1)
    for part in chunks(len(index_K), row_bytes, chunk_bytes):
        yield index_K[part]


def _logit_dtype(hidden_TD: Tensor, head_VD: Tensor) -> torch.dtype:
    return opmath_dtype(torch.promote_types(hidden_TD.dtype, head_VD.dtype))


def _logits(hidden_RD: Tensor, head_VD: Tensor, temperature: float) -> Tensor:
    return mm_fp32(hidden_RD, head_VD.T).div_(temperature)


def _logsumexp_(logit_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp, and the row sums of the input, which is overwritten with exp(x - max).
    torch.logsumexp would hold a second [R, V]."""
    top_R1 = logit_RV.amax(dim=1, keepdim=True)
    sum_R1 = logit_RV.sub_(top_R1).exp_().sum(dim=1, keepdim=True)
    return sum_R1.log().add_(top_R1).squeeze(1), sum_R1
