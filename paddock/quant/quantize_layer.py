"""One layer into integers. E experts, F outputs, D inputs."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from paddock.model import DecoderLayer, MoE
from paddock.quant.calibrate import ActivationObserver, ActivationStats, batch_experts, pad_rows
from paddock.quant.quantized_layers import QuantizedExperts, QuantizedLinear, replace_module
from paddock.quant.settings import QuantSettings, quantizable_linears
from paddock.quant.w4a8 import QuantError, QuantizedTensor, quantize


def quantize_layer(
    block: DecoderLayer, settings: QuantSettings, watch: ActivationObserver
) -> dict[str, QuantizedTensor]:
    """The weights of a layer that become integers, by name within it. What experts were seen to be
    given decides between scales."""
    found: dict[str, QuantizedTensor] = {}
    if settings.quantize_linears:
        for name, linear in quantizable_linears(block).items():
            found[f"{name}.weight"] = quantize(linear.weight, settings.linear_args)
    if isinstance(block.mlp, MoE):
        given = {"gate_up": watch.inputs, "down": watch.experts}
        for name, stack in block.mlp.experts.named_parameters():
            found[f"mlp.experts.{name}"] = _quantize_stack(stack, settings, given[name])
    return found


def _quantize_stack(
    stack_EFD: Tensor, settings: QuantSettings, seen: Mapping[int, ActivationStats]
) -> QuantizedTensor:
    grid, (E, F, D) = settings.expert_args, stack_EFD.shape
    integer_EFD = torch.empty_like(stack_EFD, dtype=torch.int8)
    scale_EFG = stack_EFD.new_empty(E, F, D // grid.group_columns(D))
    for some, rows_XND in _given(stack_EFD, settings, seen):
        found = quantize(stack_EFD[some], grid, rows_XND)
        integer_EFD[some], scale_EFG[some] = found.integer_XFD, found.scale_XFG
    return QuantizedTensor(integer_EFD, scale_EFG, grid.bits)


def _given(
    stack_EFD: Tensor, settings: QuantSettings, seen: Mapping[int, ActivationStats]
) -> Iterator[tuple[list[int], Tensor | None]]:
    """A few experts at a time, and what they were given; those that no text came to last."""
    met = [e for e, some in sorted(seen.items()) if some.count]
    for experts in batch_experts(stack_EFD, met, settings.calibration_rows):
        yield experts, pad_rows([seen[expert].quantized_rows_ND for expert in experts])
    others = [e for e in range(len(stack_EFD)) if e not in met]
    for experts in batch_experts(stack_EFD, others, settings.calibration_rows):
        yield experts, None


def replace_with_quantized(block: DecoderLayer, found: dict[str, QuantizedTensor]) -> None:
    """Let a layer compute with its integers."""
    for name, linear in quantizable_linears(block).items():
        weight = found.get(f"{name}.weight")
        if weight is not None:
            replace_module(block, name, QuantizedLinear(weight, linear.bias))
    if "mlp.experts.down" in found:
        experts = QuantizedExperts(found["mlp.experts.gate_up"], found["mlp.experts.down"])
        replace_module(block, "mlp.experts", experts)


def check_group_sizes(layers: nn.ModuleList, settings: QuantSettings) -> None:
    """Before hours of work: every expert matrix must be of whole groups and bytes."""
    for layer in layers:
        assert isinstance(layer, DecoderLayer)
        if isinstance(layer.mlp, MoE):
            for name, stack in layer.mlp.experts.named_parameters():
                settings.expert_args.group_columns(stack.shape[-1])
                if settings.expert_bits == 4 and stack.shape[-1] % 2:
                    raise QuantError(f"'{name}' has {stack.shape[-1]} columns; int4 wants pairs")
