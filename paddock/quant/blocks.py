"""One layer into integers. E experts, F outputs, D inputs."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from paddock.model.block import Block
from paddock.model.moe import MoE
from paddock.quant.calibrate import Seen, Watch
from paddock.quant.layers import IntegerExperts, IntegerLinear, replace_module
from paddock.quant.recipe import QuantSettings, integer_linears
from paddock.quant.w4a8 import Grid, QuantError, Quantized, quantize


def quantize_block(block: Block, settings: QuantSettings, watch: Watch) -> dict[str, Quantized]:
    """The weights of a layer that become integers, by name within it. What experts were seen to be
    given decides between scales."""
    found: dict[str, Quantized] = {}
    if settings.linears:
        for name, linear in integer_linears(block).items():
            found[f"{name}.weight"] = quantize(linear.weight, settings.linear_grid)
    if isinstance(block.mlp, MoE):
        given = {"gate_up": watch.inputs, "down": watch.experts}
        for name, stack in block.mlp.experts.named_parameters():
            found[f"mlp.experts.{name}"] = _quantize_stack(stack, settings.expert_grid, given[name])
    return found


def _quantize_stack(stack_EFD: Tensor, grid: Grid, seen: Mapping[int, Seen]) -> Quantized:
    """Expert by expert: what refining keeps in memory is several times a matrix."""
    each = []
    for expert, weight_FD in enumerate(stack_EFD):
        some = seen.get(expert)
        rows_ND = some.rounded_ND if some is not None and some.count else None
        each.append(quantize(weight_FD, grid, rows_ND))
    return Quantized(
        torch.stack([one.integer_XFD for one in each]),
        torch.stack([one.scale_XFG for one in each]),
        grid.bits,
    )


def install(block: Block, found: dict[str, Quantized]) -> None:
    """Let a layer compute with its integers."""
    for name, linear in integer_linears(block).items():
        weight = found.get(f"{name}.weight")
        if weight is not None:
            replace_module(block, name, IntegerLinear(weight, linear.bias))
    if "mlp.experts.down" in found:
        experts = IntegerExperts(found["mlp.experts.gate_up"], found["mlp.experts.down"])
        replace_module(block, "mlp.experts", experts)


def refuse_shapes(layers: nn.ModuleList, settings: QuantSettings) -> None:
    """Before hours of work: every expert matrix must be of whole groups and bytes."""
    for layer in layers:
        assert isinstance(layer, Block)
        if isinstance(layer.mlp, MoE):
            for name, stack in layer.mlp.experts.named_parameters():
                settings.expert_grid.columns(stack.shape[-1])
                if settings.expert_bits == 4 and stack.shape[-1] % 2:
                    raise QuantError(f"'{name}' has {stack.shape[-1]} columns; int4 wants pairs")
