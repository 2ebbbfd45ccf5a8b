"""Quantization-aware training (QAT) with fake-quantized int4 experts.

Only routed experts are quantized, as in the published recipe. Training refers to a function here by
name (`fake_quant = "paddock.quant.qat:int4"`): it gets the master weights, the network computes
with the result, and gradients pass straight through. Export quantizes the same master weights with
the same function (recipe "qat"), so the integers are bitwise identical.
"""

import re
from typing import Any

import torch
from torch import Tensor

from paddock.quant.w4a8 import QuantizationArgs, quantize

EXPERTS = re.compile(r"layers\.\d+\.mlp\.experts\.(gate_up|down)")  # not those of the MTP layer


def int4(name: str, weight: Tensor) -> Tensor:
    """int4 with one scale per row."""
    return _experts_only(name, weight, QuantizationArgs(bits=4))


def int4_group32(name: str, weight: Tensor) -> Tensor:
    """int4 with one scale per 32 columns; export with `expert_group_size = 32`."""
    return _experts_only(name, weight, QuantizationArgs(bits=4, group_size=32))


def int4_group128(name: str, weight: Tensor) -> Tensor:
    """int4 with one scale per 128 columns; export with `expert_group_size = 128`."""
    return _experts_only(name, weight, QuantizationArgs(bits=4, group_size=128))


def _experts_only(name: str, weight: Tensor, args: QuantizationArgs) -> Tensor:
    return fake_quantize(weight, args) if EXPERTS.fullmatch(name) else weight


def fake_quantize(weight: Tensor, args: QuantizationArgs) -> Tensor:
    """Quantize and dequantize a weight in its dtype, with a straight-through gradient.

    >>> weight = torch.tensor([[0.7, -0.34, 0.04]], requires_grad=True)
    >>> fake_quantize(weight, QuantizationArgs(bits=4)).sum().backward()
    >>> weight.grad
    tensor([[1., 1., 1.]])
    """
    return _StraightThrough.apply(weight, args)  # type: ignore[no-any-return]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, args: QuantizationArgs) -> Tensor:  # noqa: ARG004
        return quantize(weight, args).dequantized_XFD.to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grads[0], None
