"""Quantize one decoder layer. E experts, F outputs, D inputs."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from paddock.model import DecoderLayer, MoE
from paddock.quant.calibrate import ActivationObserver, ActivationStats, batch_experts, pad_rows
from paddock.quant.quantized_layers import QuantizedExperts, QuantizedLinear, replace_module
from paddock.quant.settings import QuantSettings, quantizable_linears
from paddock.quant.w4a8 import QuantError, QuantizedTensor, quantize


def quantize_layer(
    block: DecoderLayer, settings: QuantSettings, observer: ActivationObserver
) -> dict[str, QuantizedTensor]:
    """The quantized weights of a layer, by name within it. Recorded expert inputs decide between
    scales."""
    quantized: dict[str, QuantizedTensor] = {}
    if settings.quantize_linears:
        for name, linear in quantizable_linears(block).items():
            quantized[f"{name}.weight"] = quantize(linear.weight, settings.linear_args)
    if isinstance(block.mlp, MoE):
        inputs = {"gate_up": observer.inputs, "down": observer.experts}
        for name, stack in block.mlp.experts.named_parameters():
            quantized[f"mlp.experts.{name}"] = _quantize_stack(stack, settings, inputs[name])
    return quantized


def _quantize_stack(
    stack_EFD: Tensor, settings: QuantSettings, stats: Mapping[int, ActivationStats]
) -> QuantizedTensor:
    args, (E, F, D) = settings.expert_args, stack_EFD.shape
    integer_EFD = torch.empty_like(stack_EFD, dtype=torch.int8)
    scale_EFG = stack_EFD.new_empty(E, F, D // args.group_columns(D))
    for experts, rows_XND in _expert_batches(stack_EFD, settings, stats):
        quantized = quantize(stack_EFD[experts], args, rows_XND)
        integer_EFD[experts], scale_EFG[experts] = quantized.integer_XFD, quantized.scale_XFG
    return QuantizedTensor(integer_EFD, scale_EFG, args.bits)


def _expert_batches(
    stack_EFD: Tensor, settings: QuantSettings, stats: Mapping[int, ActivationStats]
) -> Iterator[tuple[list[int], Tensor | None]]:
    """Batches of experts with their recorded inputs; experts without any come last."""
    calibrated = [e for e, experts in sorted(stats.items()) if experts.count]
    for experts in batch_experts(stack_EFD, calibrated, settings.calibration_rows):
        yield experts, pad_rows([stats[expert].quantized_rows_ND for expert in experts])
    uncalibrated = [e for e in range(len(stack_EFD)) if e not in calibrated]
    for experts in batch_experts(stack_EFD, uncalibrated, settings.calibration_rows):
        yield experts, None


def replace_with_quantized(block: DecoderLayer, quantized: dict[str, QuantizedTensor]) -> None:
    """Replace the modules of a layer by quantized ones."""
    for name, linear in quantizable_linears(block).items():
        weight = quantized.get(f"{name}.weight")
        if weight is not None:
            replace_module(block, name, QuantizedLinear(weight, linear.bias))
    if "mlp.experts.down" in quantized:
        experts = QuantizedExperts(quantized["mlp.experts.gate_up"], quantized["mlp.experts.down"])
        replace_module(block, "mlp.experts", experts)


def check_group_sizes(layers: nn.ModuleList, settings: QuantSettings) -> None:
    """Check up front that every expert matrix divides into whole groups and bytes."""
    for layer in layers:
        assert isinstance(layer, DecoderLayer)
        if isinstance(layer.mlp, MoE):
            for name, stack in layer.mlp.experts.named_parameters():
                settings.expert_args.group_columns(stack.shape[-1])
                if settings.expert_bits == 4 and stack.shape[-1] % 2:
                    raise QuantError(
                        f"'{name}' has {stack.shape[-1]} columns; int4 needs an even number"
                    )
