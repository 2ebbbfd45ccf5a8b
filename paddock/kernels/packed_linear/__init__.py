"""Linear layers with weights packed for the CPU's vector units.

    packed_linear(x_TD, weight, bias_F=None)   -> x @ weight.T + bias
    packed_gate_up(x_TD, weight, inner)        -> silu(x @ gate.T) * (x @ up.T)
    packed_stack(x_THD, stack)                 -> x[:, h] @ weight[h].T for every head h
    packed_experts(x_TD, expert_TK, weight_TK, stacks)  -> routed experts (see fused_experts)

A packed weight is its [F, D] matrix as panels of 64 outputs, [P, D, 64], padded with zeros; for
bfloat16 two inputs at a time, [P, D / 2, 64, 2]. `pack` and `unpack` convert, without loss; `write`
replaces some outputs in place. Of `packed_gate_up` the panels of gate and up alternate.

8-bit weights: each output has a scale, its largest magnitude / 127, and weights are rounded to
multiples of it. A panel is the 64 scales in float32 and then [D / 2, 64, 2] integers, all as bytes.

In the kernel every sum runs over the inputs in ascending order, in float32, so that a row does not
depend on the other rows. `reference` unpacks and multiplies.
T tokens, D inputs, F outputs, P panels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paddock.kernels import cpu
from paddock.kernels.fused_experts.reference import fused_experts
from paddock.kernels.packed_linear import arena, reference

PANEL = 64
SCALE_BYTES = PANEL * torch.float32.itemsize  # at the front of a panel of 8-bit weights
INT8_MAX = 127


@dataclass(frozen=True, slots=True, eq=False)
class PrepackedWeight:
    """Panels of a weight with `outputs` outputs and `inputs` inputs."""

    panels: Tensor
    outputs: int
    inputs: int


def is_packable(weight_FD: Tensor) -> bool:
    return (
        weight_FD.device.type == "cpu"
        and weight_FD.dtype in (torch.float32, torch.bfloat16)
        and weight_FD.shape[-1] % 2 == 0
    )


def pack(weight_FD: Tensor, dtype: torch.dtype | None = None) -> PrepackedWeight:
    """Packed in its own dtype, or in int8."""
    panels = empty_panels(weight_FD.shape, dtype or weight_FD.dtype)
    packed = PrepackedWeight(panels, *weight_FD.shape)
    write(packed, weight_FD)
    return packed


def empty_panels(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeroed panels for a weight or a stack of weights of this shape: float32, bfloat16 or int8."""
    *stack, outputs, inputs = shape
    panel = {
        torch.float32: (inputs, PANEL),
        torch.bfloat16: (inputs // 2, PANEL, 2),
        torch.int8: (SCALE_BYTES + inputs * PANEL,),
    }[dtype]
    return arena.zeros((*stack, -(-outputs // PANEL), *panel), dtype)


def write(packed: PrepackedWeight, weight_FD: Tensor, first: int = 0) -> None:
    """Replace outputs from `first` on. Only their panels are touched."""
    rows_PJD, start = _by_output(packed), first
    for row_FD in weight_FD.split(_panel_sizes(first, len(weight_FD))):
        panel, within = divmod(start, PANEL)
        outputs = slice(within, within + len(row_FD))
        if packed.panels.dtype == torch.int8:
            row_FD, scale_F = quantize(row_FD)
            _scales(packed)[panel, outputs] = scale_F
        rows_PJD[panel, outputs].copy_(row_FD.unflatten(1, rows_PJD.shape[2:]))
        start += len(row_FD)


def quantize(weight_FD: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit integers [F, D], as floats, and the scale [F] that each output's are multiplied by."""
    scale_F = weight_FD.float().abs().amax(1) / INT8_MAX
    quant_FD = weight_FD / scale_F.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    return quant_FD.round(), scale_F


def _panel_sizes(first: int, rows: int) -> list[int]:
    """Rows up to the next panel, then whole panels, then the rest."""
    sizes = [min(rows, -first % PANEL)] if first % PANEL else []
    left = rows - sum(sizes)
    return [*sizes, *[PANEL] * (left // PANEL), *([left % PANEL] if left % PANEL else [])]


def unpack(packed: PrepackedWeight) -> Tensor:
    """The [F, D] matrix, a copy; of 8-bit weights what they stand for, in float32."""
    rows_PJD = _by_output(packed).flatten(2)
    if packed.panels.dtype == torch.int8:
        rows_PJD = rows_PJD * _scales(packed)[:, :, None]
    return rows_PJD.flatten(0, 1)[: packed.outputs].contiguous()


def unpack_rows(packed: PrepackedWeight, output_T: Tensor) -> Tensor:
    """Rows of the matrix [T, D], as `unpack` has them."""
    panel_T, within_T = output_T // PANEL, output_T % PANEL
    row_TD = _by_output(packed)[panel_T, within_T].flatten(1)
    if packed.panels.dtype == torch.int8:
        row_TD = row_TD * _scales(packed)[panel_T, within_T, None]
    return row_TD


def _scales(packed: PrepackedWeight) -> Tensor:
    """A view [P, 64] of the scales of 8-bit weights."""
    return packed.panels[:, :SCALE_BYTES].view(torch.float32)


def _by_output(packed: PrepackedWeight) -> Tensor:
    """A view [P, 64, D] or, for pairs of inputs, [P, 64, D / 2, 2]."""
    panels = packed.panels
    if panels.dtype == torch.int8:
        panels = panels[:, SCALE_BYTES:].unflatten(1, (-1, PANEL, 2))
    return panels.permute(0, 2, 1, 3) if panels.ndim == 4 else panels.transpose(1, 2)


def _suits(x: Tensor, *panels: Tensor) -> bool:
    return cpu.suits(x, *(panel for panel in panels if panel.dtype != torch.int8))


def packed_linear(
    x_TD: Tensor, weight: PrepackedWeight, bias_F: Tensor | None = None, *, fp32: bool = False
) -> Tensor:
    """[T, F] in x's dtype, or in float32."""
    if x_TD.ndim != 2 or not _suits(x_TD, weight.panels):
        return reference.packed_linear(x_TD, unpack(weight).to(x_TD.dtype), bias_F, fp32=fp32)
    if bias_F is not None:
        bias_F = bias_F.to(x_TD.dtype)
    dtype = torch.float32 if fp32 else x_TD.dtype
    out_TF = x_TD.new_empty(len(x_TD), weight.outputs, dtype=dtype)
    cpu.function("linear_to_f32" if fp32 else "linear", x_TD.dtype, weight.panels.dtype)(
        len(x_TD),
        weight.outputs,
        weight.inputs,
        x_TD.data_ptr(),
        x_TD.stride(0),
        weight.panels.data_ptr(),
        None if bias_F is None else bias_F.data_ptr(),
        out_TF.data_ptr(),
        weight.outputs,
    )
    return out_TF


def packed_gate_up(x_TD: Tensor, weight: PrepackedWeight, inner: int) -> Tensor:
    """[T, inner]; panels of gate and up in turn, both padded to whole panels."""
    if x_TD.ndim != 2 or not _suits(x_TD, weight.panels):
        return reference.packed_gate_up(x_TD, unpack(weight).to(x_TD.dtype), inner)
    out_TF = x_TD.new_empty(len(x_TD), inner)
    cpu.function("gate_up", x_TD.dtype, weight.panels.dtype)(
        len(x_TD),
        inner,
        weight.inputs,
        x_TD.data_ptr(),
        x_TD.stride(0),
        weight.panels.data_ptr(),
        out_TF.data_ptr(),
        inner,
    )
    return out_TF


def packed_stack(x_THD: Tensor, stack_H: PrepackedWeight) -> Tensor:
    """[T, H, F]; the panels of `stack_H` have one more dimension, the head."""
    T, H, _ = x_THD.shape
    if not cpu.suits(x_THD, stack_H.panels):
        heads = [PrepackedWeight(p, stack_H.outputs, stack_H.inputs) for p in stack_H.panels]
        return reference.packed_stack(x_THD, torch.stack([unpack(head) for head in heads]))
    out_THF = x_THD.new_empty(T, H, stack_H.outputs)
    cpu.function("linear_stack", x_THD.dtype)(
        *(H, T, stack_H.outputs, stack_H.inputs),
        *(x_THD.data_ptr(), x_THD.stride(0), x_THD.stride(1), stack_H.panels.data_ptr()),
        *(out_THF.data_ptr(), out_THF.stride(0), out_THF.stride(1)),
    )
    return out_THF


@dataclass(frozen=True, slots=True, eq=False)
class PackedExpertWeights:
    """Panels of all experts: gate and up in turn [E, 2 P, D, 64], and down [E, P, F, 64]."""

    gate_up: Tensor
    down: Tensor
    hidden: int
    inner: int

    def expert(self, e: int) -> tuple[PrepackedWeight, PrepackedWeight, PrepackedWeight]:
        """Gate, up and down of one expert."""
        gate, up = (
            PrepackedWeight(self.gate_up[e, i::2], self.inner, self.hidden) for i in range(2)
        )
        return gate, up, PrepackedWeight(self.down[e], self.hidden, self.inner)


def packed_experts(
    x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor, stacks: PackedExpertWeights
) -> Tensor:
    if not _suits(x_TD, stacks.gate_up, stacks.down):
        experts = [stacks.expert(e) for e in range(len(stacks.down))]
        gate_up_EGD = torch.stack([torch.cat((unpack(g), unpack(u))) for g, u, _ in experts])
        down_EDF = torch.stack([unpack(d) for _, _, d in experts])
        weights = (gate_up_EGD.to(x_TD.dtype), down_EDF.to(x_TD.dtype))
        return fused_experts(x_TD, expert_TK, weight_TK, *weights)
    weight_TK, expert_TK = weight_TK.float().contiguous(), expert_TK.long().contiguous()
    out_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    cpu.function("experts", x_TD.dtype, stacks.down.dtype)(
        *(len(x_TD), stacks.hidden, stacks.inner, len(stacks.down), expert_TK.shape[1]),
        *(x_TD.data_ptr(), x_TD.stride(0), expert_TK.data_ptr()),
        *(weight_TK.data_ptr(), stacks.gate_up.data_ptr(), stacks.down.data_ptr()),
        out_TD.data_ptr(),
    )
    return out_TD


__all__ = [
    "PANEL",
    "PackedExpertWeights",
    "PrepackedWeight",
    "empty_panels",
    "is_packable",
    "pack",
    "packed_experts",
    "packed_gate_up",
    "packed_linear",
    "packed_stack",
    "quantize",
    "unpack",
    "unpack_rows",
    "write",
]
