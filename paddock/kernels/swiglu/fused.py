"""Dispatch and autograd of the SwiGLU kernels: one pass each way. R rows, F inner, G = 2 F."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paddock.kernels.dispatch import can_use_kernel

BLOCK = 4096  # elements per program
COLUMNS = 1024  # of a block, at most


def suits(*tensors: Tensor) -> bool:
    first = tensors[0]
    return can_use_kernel("swiglu", *tensors) and first.ndim == 2 and first.numel() > 0


def swiglu(gate_RF: Tensor, up_RF: Tensor) -> Tensor:
    return _SwiGLU.apply(gate_RF, up_RF)  # type: ignore[no-any-return]


def silu_and_mul(both_RG: Tensor) -> Tensor:
    return _SiluAndMul.apply(both_RG)  # type: ignore[no-any-return]


def _forward(gate_RF: Tensor, up_RF: Tensor) -> Tensor:
    from . import triton as kernels

    R, F = gate_RF.shape
    out_RF = gate_RF.new_empty(R, F)
    grid, sizes = _blocks(R, F)
    kernels.forward[grid](gate_RF, up_RF, out_RF, R, gate_RF.stride(0), up_RF.stride(0), **sizes)
    return out_RF


def _backward(grad_RF: Tensor, inputs: tuple[Tensor, Tensor], grads: tuple[Tensor, Tensor]) -> None:
    from . import triton as kernels

    (gate_RF, up_RF), (dgate_RF, dup_RF) = inputs, grads
    R, F = gate_RF.shape
    grad_RF = _with_contiguous_rows(grad_RF)
    strides = [x.stride(0) for x in (grad_RF, gate_RF, up_RF, dgate_RF, dup_RF)]
    grid, sizes = _blocks(R, F)
    kernels.backward[grid](grad_RF, gate_RF, up_RF, dgate_RF, dup_RF, R, *strides, **sizes)


def _blocks(R: int, F: int) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid of blocks, and their sizes."""
    columns = min(1 << (F - 1).bit_length(), COLUMNS)
    rows = BLOCK // columns
    return (-(-R // rows), -(-F // columns)), {"F": F, "ROWS": rows, "BF": columns}


def _with_contiguous_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_RF: Tensor, up_RF: Tensor) -> Tensor:
        gate_RF, up_RF = _with_contiguous_rows(gate_RF), _with_contiguous_rows(up_RF)
        ctx.save_for_backward(gate_RF, up_RF)
        return _forward(gate_RF, up_RF)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor, Tensor]:
        inputs = ctx.saved_tensors
        grads = (torch.empty_like(inputs[0]), torch.empty_like(inputs[1]))
        _backward(grad_RF, inputs, grads)
        return grads


class _SiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both_RG: Tensor) -> Tensor:
        both_RG = _with_contiguous_rows(both_RG)
        ctx.save_for_backward(both_RG)
        gate_RF, up_RF = both_RG.chunk(2, dim=-1)
        return _forward(gate_RF, up_RF)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> Tensor:
        (both_RG,) = ctx.saved_tensors
        grad_RG = both_RG.new_empty(both_RG.shape)
        _backward(grad_RF, both_RG.chunk(2, dim=-1), grad_RG.chunk(2, dim=-1))
        return grad_RG
