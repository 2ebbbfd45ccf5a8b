"""Dispatch and autograd of the norm kernels: one pass forward, one backward. T rows, D features."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paddock.kernels.dispatch import can_use_kernel

MAX_WIDTH = 16_384
BLOCK = 4096  # elements per program
# Programs that share the rows of a backward pass, and partial sums of the weight's gradient. A
# constant, not the number of processors, so that every GPU adds in the same order.
PROGRAMS = 512


def suits(x_TD: Tensor, *parameters: Tensor) -> bool:
    return (
        can_use_kernel("norm", x_TD, *parameters)
        and all(p.dtype == x_TD.dtype for p in parameters)
        and 0 < x_TD.shape[-1] <= MAX_WIDTH
        and x_TD.numel() > 0
    )


def norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
    """layer_norm, or rms_norm where there is no bias."""
    rows_TD = x_TD.flatten(0, -2) if x_TD.ndim != 2 else x_TD
    if rows_TD.stride(1) != 1:
        rows_TD = rows_TD.contiguous()
    return _Norm.apply(rows_TD, weight_D, bias_D, eps).view(x_TD.shape)  # type: ignore[no-any-return]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float
    ) -> Tensor:
        from . import triton as kernels

        T, D = x_TD.shape
        y_TD = x_TD.new_empty(T, D)
        stats_2T = x_TD.new_empty(2, T, dtype=torch.float32)
        rows, width, warps = _blocks(D)
        kernels.forward[(-(-T // rows),)](
            x_TD, weight_D, weight_D if bias_D is None else bias_D, y_TD, stats_2T,
            eps, x_TD.stride(0), T, D=D, BD=width, ROWS=rows, LAYER=bias_D is not None,
            num_warps=warps,
        )  # fmt: skip
        ctx.save_for_backward(x_TD, weight_D, stats_2T)
        ctx.layer = bias_D is not None
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        from . import triton as kernels

        x_TD, weight_D, stats_2T = ctx.saved_tensors
        T, D = x_TD.shape
        grad_TD = grad_TD if grad_TD.stride(1) == 1 else grad_TD.contiguous()
        dx_TD = x_TD.new_empty(T, D)
        rows, width, warps = _blocks(D)
        programs = min(PROGRAMS, -(-T // rows))
        parts_2PD = x_TD.new_empty(2, programs, D, dtype=torch.float32)
        kernels.backward[(programs,)](
            grad_TD, x_TD, weight_D, stats_2T, dx_TD, parts_2PD,
            grad_TD.stride(0), x_TD.stride(0), T, programs,
            D=D, BD=width, ROWS=rows, LAYER=ctx.layer, num_warps=warps,
        )  # fmt: skip
        dweight_D = parts_2PD[0].sum(0).to(weight_D.dtype)
        dbias_D = parts_2PD[1].sum(0).to(weight_D.dtype) if ctx.layer else None
        return dx_TD, dweight_D, dbias_D, None


def _blocks(D: int) -> tuple[int, int, int]:
    """Rows of a block, the power of two that holds a row, and warps."""
    width = 1 << (D - 1).bit_length()
    return max(1, BLOCK // width), width, 8 if width > BLOCK else 4
