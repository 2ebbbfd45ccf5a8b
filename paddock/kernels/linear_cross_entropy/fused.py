"""GPU kernels of linear cross-entropy: products by PyTorch, the rest in one pass.

T tokens, K tokens with a target, R rows of one chunk, D hidden dim, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paddock.kernels.dispatch import can_use_kernel
from paddock.kernels.precision import mm_fp32
from paddock.kernels.workspace import chunks

from .reference import CHUNK_BYTES

BLOCK = 4096  # columns of a chunk read at once


def suits(hidden_TD: Tensor, head_VD: Tensor) -> bool:
    return (
        can_use_kernel("linear_cross_entropy", hidden_TD, head_VD)
        and hidden_TD.dtype == head_VD.dtype
    )


def nll(
    hidden_TD: Tensor,
    head_VD: Tensor,
    target_T: Tensor,
    temperature: float,
    chunk_bytes: int | None,
) -> Tensor:
    """Negative log-likelihood of each target; see the package's contract."""
    chunk_bytes = chunk_bytes or 4 * CHUNK_BYTES
    return _NegLogLikelihood.apply(hidden_TD, head_VD, target_T, temperature, chunk_bytes)  # type: ignore[no-any-return]


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
        from paddock.kernels.linear_cross_entropy import triton as kernels

        nll_T = hidden_TD.new_zeros(len(target_T), dtype=torch.float32)
        lse_T = torch.zeros_like(nll_T)
        index_K = (target_T >= 0).nonzero().squeeze(1)
        V = len(head_VD)
        for rows_R in _rows(index_K, len(target_T), V, chunk_bytes):
            logit_RV = mm_fp32(_take(hidden_TD, rows_R), head_VD.T)
            lse_R = nll_T.new_empty(len(logit_RV))
            nll_R = torch.empty_like(lse_R)
            kernels.loss[(len(logit_RV),)](
                logit_RV, _take(target_T, rows_R), lse_R, nll_R, 1.0 / temperature, V,
                BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip
            lse_T[rows_R], nll_T[rows_R] = lse_R, nll_R
        ctx.save_for_backward(hidden_TD, head_VD, target_T, lse_T, index_K)
        ctx.temperature, ctx.chunk_bytes = temperature, chunk_bytes
        return nll_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        from paddock.kernels.linear_cross_entropy import triton as kernels

        hidden_TD, head_VD, target_T, lse_T, index_K = ctx.saved_tensors
        V = len(head_VD)
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        grad_hidden_TD = torch.zeros_like(hidden_TD) if wants_hidden else None
        # Sums over chunks, so it must not round to half between them.
        grad_head_VD = torch.zeros_like(head_VD, dtype=torch.float32) if wants_head else None
        grad_T = grad_T.float().contiguous()
        for rows_R in _rows(index_K, len(target_T), V, ctx.chunk_bytes):
            hidden_RD = _take(hidden_TD, rows_R)
            logit_RV = mm_fp32(hidden_RD, head_VD.T)
            grad_RV = torch.empty_like(logit_RV, dtype=hidden_TD.dtype)
            kernels.gradient[(len(logit_RV), -(-V // BLOCK))](
                logit_RV, _take(target_T, rows_R), _take(lse_T, rows_R), _take(grad_T, rows_R),
                grad_RV, 1.0 / ctx.temperature, V, BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip
            del logit_RV
            if grad_hidden_TD is not None:
                grad_hidden_TD[rows_R] = grad_RV @ head_VD
            if grad_head_VD is not None:
                grad_head_VD += mm_fp32(grad_RV.T, hidden_RD)
        if grad_head_VD is not None:
            grad_head_VD = grad_head_VD.to(head_VD.dtype)
        return grad_hidden_TD, grad_head_VD, None, None, None


def _rows(index_K: Tensor, T: int, V: int, chunk_bytes: int) -> Iterator[Tensor | slice]:
    """Rows with a target, as many at a time as `chunk_bytes` of logits allow; a slice if all."""
    for part in chunks(len(index_K), 4 * V, chunk_bytes):
        yield part if len(index_K) == T else index_K[part]


def _take(x: Tensor, rows_R: Tensor | slice) -> Tensor:
    return x[rows_R].contiguous()
