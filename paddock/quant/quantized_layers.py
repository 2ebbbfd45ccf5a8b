"""Layers that compute with integers.

Integers are no state of a network in the sense of `state_dict`: nothing that hands weights around
would know what to do with them.

T tokens, D inputs or hidden, F outputs or inner, E experts, K chosen per token, R = T * K rows.
"""

from typing import Any

from torch import Tensor, nn

from paddock.kernels.moe_permute import sort_by_expert, unpermute
from paddock.kernels.w4a8_gemm import (
    PackedWeight,
    int_grouped_gemm,
    int_linear,
    quantize_per_token,
    silu_and_mul_quantize,
)
from paddock.model import Routing
from paddock.quant.w4a8 import QuantizedTensor


class QuantizedLinear(nn.Module):
    """A linear map of integer weights; inputs are rounded to int8, each row by itself."""

    integer: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: QuantizedTensor, bias: Tensor | None = None) -> None:
        super().__init__()
        stored = weight.pack()
        self.packed = stored.packed
        self.register_buffer("integer", stored.integer, persistent=False)
        self.register_buffer("scale", stored.scale_XFG, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        out_TF = self.linear_with(x_TD, self.integer, self.scale)
        return out_TF if self.bias is None else out_TF + self.bias.to(out_TF.dtype)

    def weights_by_output(self) -> tuple[Tensor, ...] | None:
        """What it holds, outputs first: others of its kind may lie behind it (see `together`)."""
        return (self.integer, self.scale) if self.bias is None else None

    def linear_with(self, x_TD: Tensor, integer: Tensor, scale: Tensor) -> Tensor:
        weight = PackedWeight(integer, scale, self.packed)
        return int_linear(quantize_per_token(x_TD), weight, x_TD.dtype)


class QuantizedExperts(nn.Module):
    """Routed experts of integer weights, as two stacks; gate rows first."""

    gate_up: Tensor
    gate_up_scale: Tensor
    down: Tensor
    down_scale: Tensor

    def __init__(self, gate_up: QuantizedTensor, down: QuantizedTensor) -> None:
        super().__init__()
        up, back = gate_up.pack(), down.pack()
        self.up_packed, self.down_packed = up.packed, back.packed
        self.register_buffer("gate_up", up.integer, persistent=False)
        self.register_buffer("gate_up_scale", up.scale_XFG, persistent=False)
        self.register_buffer("down", back.integer, persistent=False)
        self.register_buffer("down_scale", back.scale_XFG, persistent=False)

    def forward(self, x_TD: Tensor, routing: Routing) -> Tensor:
        order = sort_by_expert(routing.expert_TK, routing.score_TE.shape[1])
        up = PackedWeight(self.gate_up, self.gate_up_scale, self.up_packed)
        back = PackedWeight(self.down, self.down_scale, self.down_packed)
        counts_E, rows = (
            order.counts_E,
            quantize_per_token(x_TD),
        )  # once a token, not once an expert
        inner = silu_and_mul_quantize(
            int_grouped_gemm(rows, up, counts_E, x_TD.dtype, order.token_R)
        )
        answer_RD = int_grouped_gemm(inner, back, counts_E, x_TD.dtype)
        return unpermute(answer_RD, routing.weight_TK, order)


def replace_module(root: nn.Module, path: str, new: nn.Module) -> None:
    """Put a module where another was."""
    parent, _, name = path.rpartition(".")
    owner: Any = root.get_submodule(parent)
    setattr(owner, name, new)
