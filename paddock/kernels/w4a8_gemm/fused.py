"""Dispatch of the integer GEMM kernels. R rows, D inputs, F outputs, E experts, H packed bytes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paddock.kernels.dispatch import can_use_kernel, has_triton, is_enabled

from .reference import PackedWeight, QuantizedActivations

MIN_BLOCK = 32  # minimum columns of an int8 tensor core
MAX_BLOCK = 128
MAX_ROW_WIDTH = 16_384
MAX_EXPERTS = 1024
# Exact division dominates quantization; up to this many rows, programs share the columns of a row.
SHARED_ROWS, SHARED_PART = 64, 1024


def rounds(x_RD: Tensor) -> bool:
    return can_use_kernel("w4a8_gemm", x_RD) and x_RD.numel() > 0 and x_RD.shape[1] <= MAX_ROW_WIDTH


def suits(rows: QuantizedActivations, weight: PackedWeight) -> bool:
    return (
        rows.integer_RD.is_cuda
        and is_enabled("w4a8_gemm")
        and weight.integer.is_cuda
        and rows.integer_RD.get_device() == torch.cuda.current_device()
        and has_triton()
        and rows.count > 0
        and weight.integer.shape[0] <= MAX_EXPERTS
        and block_columns(weight) >= MIN_BLOCK
    )


def block_columns(weight: PackedWeight) -> int:
    """Columns multiplied at a time: a power of two that divides the stored columns and a group of
    scales, so that no block needs a mask or two scales."""
    stored = weight.integer.shape[-1]
    if weight.scale_XFG.shape[-1] == 1:
        shared = stored
    else:
        shared = weight.group
        while stored % shared:  # a group may span the middle of a packed row
            shared //= 2
    return min(MAX_BLOCK, shared & -shared)


@dataclass(frozen=True, slots=True)
class GemmTile:
    """Tile sizes: outputs, rows and columns of a block, and how many ways the warps of a program
    split its columns."""

    outputs: int
    rows: int
    columns: int
    slices: int
    warps: int
    stages: int

    def fitted(self, weight: PackedWeight) -> "GemmTile":
        """The tile with columns and slices reduced until they divide those of the weight."""
        columns = min(self.columns, block_columns(weight))
        blocks = weight.integer.shape[-1] // columns
        return replace(self, columns=columns, slices=min(self.slices, blocks & -blocks))


# By maximum average rows per matrix; above the last, the last. Measured on an H200 with
# `python -m benchmarks.quant_gpu tiles`.
LARGE = {512: GemmTile(128, 128, 64, slices=1, warps=8, stages=4)}
# One matrix with long rows has few programs, whose warps share the columns.
ONE = {
    16: GemmTile(16, 16, 128, slices=4, warps=4, stages=4),
    64: GemmTile(64, 32, 128, slices=1, warps=4, stages=6),
    256: GemmTile(64, 64, 128, slices=1, warps=4, stages=4),
    **LARGE,
}
ONE_NARROW = {
    16: GemmTile(64, 16, 128, slices=1, warps=4, stages=6),
    64: GemmTile(64, 32, 128, slices=1, warps=4, stages=6),
    256: GemmTile(64, 128, 128, slices=1, warps=4, stages=3),
    **LARGE,
}
NARROW = 1024  # bytes of a row of weights
STACK = {
    16: GemmTile(64, 16, 128, slices=1, warps=4, stages=4),
    64: GemmTile(64, 64, 128, slices=1, warps=4, stages=4),
    256: GemmTile(64, 128, 64, slices=1, warps=4, stages=4),
    **LARGE,
}


def tile_for(rows: int, weight: PackedWeight) -> GemmTile:
    experts, _, width = weight.integer.shape
    tiles = STACK if experts > 1 else ONE_NARROW if width <= NARROW else ONE
    each = -(-rows // min(rows, experts))
    chosen = next((tile for max_rows, tile in tiles.items() if each <= max_rows), tiles[max(tiles)])
    return chosen.fitted(weight)


def shifts_words(device: torch.device) -> bool:
    """Whether four bytes may be shifted as one word, which needs an NVIDIA instruction."""
    return device.type == "cuda" and torch.version.hip is None


def quantize_per_token(x_RD: Tensor) -> QuantizedActivations:
    return _quantize(x_RD, x_RD.shape[1], gated=False)


def silu_and_mul_quantize(both_RG: Tensor) -> QuantizedActivations:
    return _quantize(both_RG, both_RG.shape[1] // 2, gated=True)


def _quantize(x_RX: Tensor, D: int, *, gated: bool) -> QuantizedActivations:
    from . import triton as kernels

    R = len(x_RX)
    if x_RX.stride(-1) != 1:
        x_RX = x_RX.contiguous()
    integer_RD = torch.empty(R, D, dtype=torch.int8, device=x_RX.device)
    scale_R = torch.empty(R, dtype=torch.float32, device=x_RX.device)
    width = 1 << (D - 1).bit_length()
    part = min(width, SHARED_PART) if R <= SHARED_ROWS else width
    kernels.round_rows[(R, -(-D // part))](
        x_RX, integer_RD, scale_R, x_RX.stride(0), D=D, BD=width, BP=part, GATED=gated,
        num_warps=4 if width <= 2048 else 8,
    )  # fmt: skip
    return QuantizedActivations(integer_RD, scale_R)


def int_grouped_gemm(
    rows: QuantizedActivations,
    weight: PackedWeight,
    counts_E: Sequence[int] | Tensor,
    dtype: torch.dtype,
    source_R: Tensor | None = None,
) -> Tensor:
    R = rows.count if source_R is None else len(source_R)
    return multiply(rows, weight, counts_E, dtype, tile_for(R, weight), source_R)


def multiply(
    rows: QuantizedActivations,
    weight: PackedWeight,
    counts_E: Sequence[int] | Tensor,
    dtype: torch.dtype,
    tile: GemmTile,
    source_R: Tensor | None = None,
) -> Tensor:
    """The product with this tile, which must fit the weight."""
    from . import triton as kernels

    (R, D), (E, F, _) = rows.integer_RD.shape, weight.integer.shape
    if source_R is not None:
        assert source_R.is_contiguous()
        R = len(source_R)
    device = rows.integer_RD.device
    out_RF = torch.empty(R, F, dtype=dtype, device=device)
    # Upper bound of blocks with rows: the last block of an expert may be partly empty.
    blocks = -(-R // tile.rows) if E == 1 else min(R, E) + R // tile.rows
    kernels.multiply[(blocks, -(-F // tile.outputs))](
        rows.integer_RD.contiguous(), rows.scale_R, source_R, weight.integer, weight.scale_XFG,
        None if E == 1 else _counts_on(counts_E, device), out_RF, R, F,
        D=D, E=E, BE=1 << (E - 1).bit_length(), G=weight.scale_XFG.shape[-1],
        PACKED=weight.packed, BF=tile.outputs, BN=tile.rows, BK=tile.columns, SLICES=tile.slices,
        WORDS=shifts_words(device), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out_RF


def _counts_on(counts_E: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    if isinstance(counts_E, Tensor):
        return counts_E.to(device)
    return torch.tensor(counts_E, dtype=torch.int32, device=device)
