"""INT4-aware training: a network learns with the very numbers it will be exported as.

Routed experts alone, as the published recipe has it. A function here goes where training asks for
one by name (`fake_quant = "paddock.quant.qat:int4"`): it sees the exact weights, the network
computes with what comes back, and gradients go straight through. Exporting quantizes the same exact
weights by the same function (recipe "qat"), so the integers are the same to the bit.
"""

import re
from typing import Any

import torch
from torch import Tensor

from paddock.quant.w4a8 import QuantizationArgs, quantize

EXPERTS = re.compile(r"layers\.\d+\.mlp\.experts\.(gate_up|down)")  # not the MTP layer's


def int4(name: str, weight: Tensor) -> Tensor:
    """One scale a row."""
    return _experts_only(name, weight, QuantizationArgs(bits=4))


def int4_group32(name: str, weight: Tensor) -> Tensor:
    """One scale for each 32 columns; export with `expert_group = 32`."""
    return _experts_only(name, weight, QuantizationArgs(bits=4, group_size=32))


def int4_group128(name: str, weight: Tensor) -> Tensor:
    """One scale for each 128 columns; export with `expert_group = 128`."""
    return _experts_only(name, weight, QuantizationArgs(bits=4, group_size=128))


def _experts_only(name: str, weight: Tensor, grid: QuantizationArgs) -> Tensor:
    return fake_quantize(weight, grid) if EXPERTS.fullmatch(name) else weight


def fake_quantize(weight: Tensor, grid: QuantizationArgs) -> Tensor:
    """The numbers that the integers of a weight stand for, in its dtype; the gradient of them is
    taken for the weight's own.

    >>> weight = torch.tensor([[0.7, -0.34, 0.04]], requires_grad=True)
    >>> fake_quantize(weight, QuantizationArgs(bits=4)).sum().backward()
    >>> weight.grad
    tensor([[1., 1., 1.]])
    """
    return _Straight.apply(weight, grid)  # type: ignore[no-any-return]


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, grid: QuantizationArgs) -> Tensor:  # noqa: ARG004
        return quantize(weight, grid).dequantized_XFD.to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grads[0], None
