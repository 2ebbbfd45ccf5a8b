"""How rotation runs on a GPU: one pass that copies the dims it leaves alone.

T tokens, H heads, D dims, P pairs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paddock.kernels.dispatch import can_use_kernel

BLOCK = 4096  # numbers a program holds at once


def suits(x_THD: Tensor, cos_TP: Tensor) -> bool:
    """Half precision on a GPU; pairs by a power of two."""
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
        return _turn(x_THD, cos_TP, sin_TP, ctx.layout, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        cos_TP, sin_TP = ctx.saved_tensors
        dx_THD = _turn(grad_THD, cos_TP, sin_TP, ctx.layout, back=True)
        return dx_THD, None, None, None, None


def _turn(
    x_THD: Tensor, cos_TP: Tensor, sin_TP: Tensor, layout: tuple[int, bool], *, back: bool
) -> Tensor:
    """Forward, or back by the same angle, which is the gradient of forward."""
    from . import triton as kernels

    x_THD = x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()
    (T, H, D), P = x_THD.shape, cos_TP.shape[1]
    first, interleaved = layout
    after = D - first - 2 * P
    out_THD = x_THD.new_empty(T, H, D)
    rows = max(1, BLOCK // max(2 * P, _power(first), _power(after)))
    kernels.rotate[(-(-T * H // rows),)](
        x_THD, cos_TP, sin_TP, out_THD, T * H, H, x_THD.stride(0), x_THD.stride(1),
        P=P, FIRST=first, AFTER=after, BF=_power(first), BA=_power(after), ROWS=rows,
        INTERLEAVED=interleaved, BACK=back,
    )  # fmt: skip
    return out_THD


def _power(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
