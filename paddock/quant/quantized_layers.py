"""Linear layers and experts with integer weights.

Integer weights are non-persistent buffers and not in `state_dict`: code that moves weights around
expects floats.

T tokens, D inputs or hidden, F outputs or inner, E experts, K routed per token, R = T * K rows.
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
    """Linear layer with integer weights and dynamic per-token int8 activations."""

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
        """Its tensors, outputs first, so that adjacent layers can be fused (model.fuse)."""
        return (self.integer, self.scale) if self.bias is None else None

    def linear_with(self, x_TD: Tensor, integer: Tensor, scale: Tensor) -> Tensor:
        weight = PackedWeight(integer, scale, self.packed)
        return int_linear(quantize_per_token(x_TD), weight, x_TD.dtype)


class QuantizedExperts(nn.Module):
    """Routed experts with integer weights, as two stacks; gate rows first."""

    gate_up: Tensor
    gate_up_scale: Tensor
    down: Tensor
    down_scale: Tensor

    def __init__(self, gate_up: QuantizedTensor, down: QuantizedTensor) -> None:
        super().__init__()
        up_weight, down_weight = gate_up.pack(), down.pack()
        self.up_packed, self.down_packed = up_weight.packed, down_weight.packed
        self.register_buffer("gate_up", up_weight.integer, persistent=False)
        self.register_buffer("gate_up_scale", up_weight.scale_XFG, persistent=False)
        self.register_buffer("down", down_weight.integer, persistent=False)
        self.register_buffer("down_scale", down_weight.scale_XFG, persistent=False)

    def forward(self, x_TD: Tensor, routing: Routing) -> Tensor:
        order = sort_by_expert(routing.expert_TK, routing.score_TE.shape[1])
        up_weight = PackedWeight(self.gate_up, self.gate_up_scale, self.up_packed)
        down_weight = PackedWeight(self.down, self.down_scale, self.down_packed)
        counts_E, rows = order.counts_E, quantize_per_token(x_TD)  # once per token, not per expert
        inner = silu_and_mul_quantize(
            int_grouped_gemm(rows, up_weight, counts_E, x_TD.dtype, order.token_R)
        )
        output_RD = int_grouped_gemm(inner, down_weight, counts_E, x_TD.dtype)
        return unpermute(output_RD, routing.weight_TK, order)


def replace_module(root: nn.Module, path: str, new: nn.Module) -> None:
    """Replace the submodule at `path`."""
    parent, _, name = path.rpartition(".")
    owner: Any = root.get_submodule(parent)
    setattr(owner, name, new)
