"""Dispatch and autograd of the RoPE kernel: one pass, which copies dims that are not rotated.

T tokens, H heads, D dims, P pairs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paddock.kernels.dispatch import can_use_kernel

BLOCK = 4096  # elements per program


def suits(x_THD: Tensor, cos_TP: Tensor) -> bool:
    """Half precision on a GPU; the number of pairs a power of two."""
    pairs = cos_TP.shape[-1]
    return (
        can_use_kernel("rope", x_THD)
        and x_THD.ndim == 3
        and x_THD.numel() > 0
        and cos_TP.dtype == torch.float32
        and pairs & (pairs - 1) == 0
    )


def rotate(
    x_THD: Tensor, cos_TP: Tensor, sin_TP: Tensor, first: int, *, interleaved: bool
) -> Tensor:
    return _Rotate.apply(x_THD, cos_TP, sin_TP, first, interleaved)  # type: ignore[no-any-return]


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_THD: Tensor, cos_TP: Tensor, sin_TP: Tensor, first: int, interleaved: bool
    ) -> Tensor:
        cos_TP, sin_TP = cos_TP.contiguous(), sin_TP.contiguous()
        ctx.save_for_backward(cos_TP, sin_TP)
        ctx.layout = (first, interleaved)
        return _launch(x_THD, cos_TP, sin_TP, ctx.layout, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        cos_TP, sin_TP = ctx.saved_tensors
        dx_THD = _launch(grad_THD, cos_TP, sin_TP, ctx.layout, back=True)
        return dx_THD, None, None, None, None


def _launch(
    x_THD: Tensor, cos_TP: Tensor, sin_TP: Tensor, layout: tuple[int, bool], *, back: bool
) -> Tensor:
    """Rotate; with `back` by the negative angle, which is the gradient."""
    from . import triton as kernels

    x_THD = x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()
    (T, H, D), P = x_THD.shape, cos_TP.shape[1]
    first, interleaved = layout
    after = D - first - 2 * P
    out_THD = x_THD.new_empty(T, H, D)
    rows = max(1, BLOCK // max(2 * P, _next_power_of_2(first), _next_power_of_2(after)))
    kernels.rotate[(-(-T * H // rows),)](
        x_THD, cos_TP, sin_TP, out_THD, T * H, H, x_THD.stride(0), x_THD.stride(1),
        P=P, FIRST=first, AFTER=after, BF=_next_power_of_2(first), BA=_next_power_of_2(after),
        ROWS=rows, INTERLEAVED=interleaved, BACK=back,
    )  # fmt: skip
    return out_THD


def _next_power_of_2(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
