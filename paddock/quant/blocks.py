"""One layer into integers. E experts, F outputs, D inputs."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from paddock.model.decoder_layer import DecoderLayer
from paddock.model.moe import MoE
from paddock.quant.calibrate import Seen, Watch, side_by_side, together
from paddock.quant.layers import IntegerExperts, IntegerLinear, replace_module
from paddock.quant.recipe import QuantSettings, integer_linears
from paddock.quant.w4a8 import QuantError, Quantized, quantize


def quantize_block(
    block: DecoderLayer, settings: QuantSettings, watch: Watch
) -> dict[str, Quantized]:
    """The weights of a layer that become integers, by name within it. What experts were seen to be
    given decides between scales."""
    found: dict[str, Quantized] = {}
    if settings.linears:
        for name, linear in integer_linears(block).items():
            found[f"{name}.weight"] = quantize(linear.weight, settings.linear_grid)
    if isinstance(block.mlp, MoE):
        given = {"gate_up": watch.inputs, "down": watch.experts}
        for name, stack in block.mlp.experts.named_parameters():
            found[f"mlp.experts.{name}"] = _quantize_stack(stack, settings, given[name])
    return found


def _quantize_stack(
    stack_EFD: Tensor, settings: QuantSettings, seen: Mapping[int, Seen]
) -> Quantized:
    grid, (E, F, D) = settings.expert_grid, stack_EFD.shape
    integer_EFD = torch.empty_like(stack_EFD, dtype=torch.int8)
    scale_EFG = stack_EFD.new_empty(E, F, D // grid.columns(D))
    for some, rows_XND in _given(stack_EFD, settings, seen):
        found = quantize(stack_EFD[some], grid, rows_XND)
        integer_EFD[some], scale_EFG[some] = found.integer_XFD, found.scale_XFG
    return Quantized(integer_EFD, scale_EFG, grid.bits)


def _given(
    stack_EFD: Tensor, settings: QuantSettings, seen: Mapping[int, Seen]
) -> Iterator[tuple[list[int], Tensor | None]]:
    """A few experts at a time, and what they were given; those that no text came to last."""
    met = [e for e, some in sorted(seen.items()) if some.count]
    for experts in together(stack_EFD, met, settings.rows):
        yield experts, side_by_side([seen[expert].rounded_ND for expert in experts])
    others = [e for e in range(len(stack_EFD)) if e not in met]
    for experts in together(stack_EFD, others, settings.rows):
        yield experts, None


def install(block: DecoderLayer, found: dict[str, Quantized]) -> None:
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
        assert isinstance(layer, DecoderLayer)
        if isinstance(layer.mlp, MoE):
            for name, stack in layer.mlp.experts.named_parameters():
                settings.expert_grid.columns(stack.shape[-1])
                if settings.expert_bits == 4 and stack.shape[-1] % 2:
                    raise QuantError(f"'{name}' has {stack.shape[-1]} columns; int4 wants pairs")
