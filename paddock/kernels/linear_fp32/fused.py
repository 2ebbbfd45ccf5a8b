"""GPU implementation of the float32 linear layer. T tokens, D inputs, E outputs."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paddock.kernels.dispatch import is_enabled
from paddock.kernels.precision import mm_fp32


def suits(x_TD: Tensor, weight_ED: Tensor) -> bool:
    return (
        is_enabled("linear_fp32")
        and x_TD.is_cuda
        and x_TD.ndim == 2
        and x_TD.dtype in (torch.bfloat16, torch.float16)
        and weight_ED.dtype in (x_TD.dtype, torch.float32)
    )


def linear_fp32(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    return _LinearFP32.apply(x_TD, weight_ED)  # type: ignore[no-any-return]


class _LinearFP32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        if weight_ED.dtype == x_TD.dtype:
            return mm_fp32(x_TD, weight_ED.T)
        # A float32 weight as two halves: x keeps its own type, and 16 bits of the weight count.
        high_ED = weight_ED.to(x_TD.dtype)
        low_ED = (weight_ED - high_ED).to(x_TD.dtype)
        both_TE = mm_fp32(x_TD, torch.cat((high_ED, low_ED)).T)
        high_TE, low_TE = both_TE.chunk(2, dim=1)
        return high_TE + low_TE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TD, weight_ED = ctx.saved_tensors
        grad_TE = grad_TE.to(x_TD.dtype)
        dx_TD = grad_TE @ weight_ED.to(x_TD.dtype) if ctx.needs_input_grad[0] else None
        dweight_ED = mm_fp32(grad_TE.T, x_TD) if ctx.needs_input_grad[1] else None
        if dweight_ED is not None:
            dweight_ED = dweight_ED.to(weight_ED.dtype)
        return dx_TD, dweight_ED
