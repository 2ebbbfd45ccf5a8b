"""How products of integers run on a GPU. R rows, D inputs, F outputs, E experts, H packed bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paddock.kernels.twins import allowed, has_triton, usable

from .reference import Rows, Weight

LEAST_BLOCK = 32  # columns an int8 tensor core takes at least
WIDEST_BLOCK = 128
WIDEST_ROW = 16_384
MOST_EXPERTS = 1024
FULL = 264  # programs that keep the largest chips busy: two for each of 132 multiprocessors


def rounds(x_RD: Tensor) -> bool:
    return usable("w4a8_gemm", x_RD) and x_RD.numel() > 0 and x_RD.shape[1] <= WIDEST_ROW


def suits(rows: Rows, weight: Weight) -> bool:
    return (
        rows.integer_RD.is_cuda
        and allowed("w4a8_gemm")
        and weight.integer.is_cuda
        and rows.integer_RD.get_device() == torch.cuda.current_device()
        and has_triton()
        and rows.count > 0
        and weight.integer.shape[0] <= MOST_EXPERTS
        and block_columns(weight) >= LEAST_BLOCK
    )


def block_columns(weight: Weight) -> int:
    """The columns multiplied at a time: a power of two that divides what a pass walks over and a
    group of scales, so that no block needs a mask or two scales."""
    walked = weight.integer.shape[-1]
    if weight.scale_XFG.shape[-1] == 1:
        shared = walked
    else:
        shared = weight.group
        while walked % shared:  # a group may reach over the middle of a packed row
            shared //= 2
    return min(WIDEST_BLOCK, shared & -shared)


@dataclass(frozen=True, slots=True)
class Tile:
    """How the work is cut: outputs and rows of a block, programs that share its columns."""

    outputs: int
    rows: int
    split: int
    warps: int
    stages: int

    @classmethod
    def of(cls, rows: int, experts: int, outputs: int, steps: int) -> "Tile":
        """Few rows leave nothing to do but read weights, which wants many programs; sharing columns
        makes more of them without reading the rows more often, as smaller blocks would. `steps` are
        the passes over the columns."""
        each = -(-rows // min(rows, experts))
        width = next(size for size in (16, 32, 64, 128) if size >= min(each, 128))
        height = 128 if width == 128 else 64
        blocks = min(rows, experts) * -(-each // width) * -(-outputs // height)
        split = max(1, min(8, FULL // blocks, steps // 4))
        return cls(height, width, split, warps=8 if width == 128 else 4, stages=4)


def quantize_rows(x_RD: Tensor) -> Rows:
    from . import triton as twin

    R, D = x_RD.shape
    if x_RD.stride(-1) != 1:
        x_RD = x_RD.contiguous()
    integer_RD = torch.empty(R, D, dtype=torch.int8, device=x_RD.device)
    scale_R = torch.empty(R, dtype=torch.float32, device=x_RD.device)
    width = 1 << (D - 1).bit_length()
    warps = 4 if width <= 2048 else 8
    twin.round_rows[(R,)](x_RD, integer_RD, scale_R, x_RD.stride(0), D=D, BD=width, num_warps=warps)
    return Rows(integer_RD, scale_R)


def integer_grouped(
    rows: Rows, weight: Weight, counts_E: Sequence[int] | Tensor, dtype: torch.dtype
) -> Tensor:
    from . import triton as twin

    (R, D), (E, F, W) = rows.integer_RD.shape, weight.integer.shape
    device, G, BK = rows.integer_RD.device, weight.scale_XFG.shape[-1], block_columns(weight)
    counts = _counted(counts_E, device)
    out_RF = torch.empty(R, F, dtype=dtype, device=device)
    tile = Tile.of(R, E, F, W // BK)
    summed = torch.int32 if G == 1 else torch.float32
    parts = torch.empty(tile.split, R, F, dtype=summed, device=device) if tile.split > 1 else out_RF
    sizes = {"E": E, "BE": 1 << (E - 1).bit_length(), "G": G, "SPLIT": tile.split}
    # At most so many blocks of rows have any: an expert's last one may be half empty.
    twin.multiply[(min(R, E) + R // tile.rows, -(-F // tile.outputs), tile.split)](
        rows.integer_RD.contiguous(),
        rows.scale_R,
        weight.integer,
        weight.scale_XFG,
        counts,
        parts,
        R,
        F,
        D=D,
        PACKED=weight.packed,
        BF=tile.outputs,
        BN=tile.rows,
        BK=BK,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **sizes,
    )
    if tile.split > 1:
        twin.add_up[(R, -(-F // 1024))](
            parts, rows.scale_R, weight.scale_XFG, counts, out_RF, R, F, BF=1024, **sizes
        )
    return out_RF


def _counted(counts_E: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """On the device; of one matrix without a copy from the host, which no graph could record."""
    if isinstance(counts_E, Tensor):
        return counts_E.to(device, torch.int32)
    if len(counts_E) == 1:
        return torch.full((1,), counts_E[0], dtype=torch.int32, device=device)
    return torch.tensor(counts_E, dtype=torch.int32, device=device)
