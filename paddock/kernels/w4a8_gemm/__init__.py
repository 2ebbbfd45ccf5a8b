"""Integer GEMM: int8 activations with int4 or int8 weights, single matrix or one per expert.

    quantize_per_token(x_RD)        -> QuantizedActivations: integers in [-127, 127], scale per row
    silu_and_mul_quantize(both_RG)  -> QuantizedActivations of silu(gate) * up (see kernels.swiglu)
    int_linear(rows, weight, dtype)                 -> out_RF, rows times one matrix
    int_grouped_gemm(rows, weight, counts_E, dtype) -> out_RF, rows sorted by expert
    int_grouped_gemm(rows, weight, counts_E, dtype, source_R)  the same of rows[source_R]

    out[r, f] = row_scale[r] * sum_g scale[f, g] * sum_{d in g} row[r, d] * weight[f, d]

`PackedWeight` holds the integers, two int4 per byte, and float32 scales: one per row of the matrix,
or one per group of columns. Inner sums are integers, hence exact in any order: a row's result does
not depend on its neighbours, and with one scale per row of the matrix reference and kernel are
bitwise identical in float32. With groups they agree to float32's rounding.

`reference` is the definition, on any device. On a GPU, where a row's bytes allow it, Triton reads
the packed weights as they are and multiplies in int8.
R rows, D inputs, F outputs, E experts, G groups of columns, H bytes of a packed row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paddock.kernels.swiglu import silu_and_mul

from . import fused, reference
from .reference import PackedWeight, QuantizedActivations, pack_halves, unpack_halves


def quantize_per_token(x_RD: Tensor) -> QuantizedActivations:
    if fused.rounds(x_RD):
        return fused.quantize_per_token(x_RD)
    return reference.quantize_per_token(x_RD)


def silu_and_mul_quantize(both_RG: Tensor) -> QuantizedActivations:
    if fused.rounds(both_RG):
        return fused.silu_and_mul_quantize(both_RG)
    return reference.quantize_per_token(silu_and_mul(both_RG))


def int_linear(rows: QuantizedActivations, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    return int_grouped_gemm(rows, weight.as_stack(), (rows.count,), dtype)


def int_grouped_gemm(
    rows: QuantizedActivations,
    weight: PackedWeight,
    counts_E: Sequence[int] | Tensor,
    dtype: torch.dtype,
    source_R: Tensor | None = None,
) -> Tensor:
    implementation = fused if fused.suits(rows, weight) else reference
    return implementation.int_grouped_gemm(rows, weight, counts_E, dtype, source_R)


__all__ = [
    "PackedWeight",
    "QuantizedActivations",
    "int_grouped_gemm",
    "int_linear",
    "pack_halves",
    "quantize_per_token",
    "silu_and_mul_quantize",
    "unpack_halves",
]
