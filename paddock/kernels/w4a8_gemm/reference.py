"""Reference of the integer GEMM.

R rows, D inputs, F outputs, E experts, G groups of columns, H = D / 2 bytes of a packed row, X any
leading dims.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

LIMIT = 127
# Number of int8 products that float32 sums exactly: 1040 * 127 * 127 < 2^24.
EXACT = 1040


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedActivations:
    """Activations as integers, each row with its scale."""

    integer_RD: Tensor  # int8
    scale_R: Tensor  # float32

    @property
    def count(self) -> int:
        return self.integer_RD.shape[0]

    def __getitem__(self, index_N: Tensor) -> "QuantizedActivations":
        return QuantizedActivations(self.integer_RD[index_N], self.scale_R[index_N])


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A matrix, or a stack of them, as integers and scales.

    `integer` is int8 [X, F, D]; or, where `packed`, bytes [X, F, H] of two int4 each.
    """

    integer: Tensor
    scale_XFG: Tensor  # float32
    packed: bool

    @property
    def inputs(self) -> int:
        return self.integer.shape[-1] * (2 if self.packed else 1)

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.inputs // self.scale_XFG.shape[-1]

    @property
    def integer_XFD(self) -> Tensor:
        return unpack_halves(self.integer) if self.packed else self.integer

    def as_stack(self) -> "PackedWeight":
        return PackedWeight(self.integer.unsqueeze(0), self.scale_XFG.unsqueeze(0), self.packed)


def pack_halves(integer_XFD: Tensor) -> Tensor:
    """int4 values two to a byte: the left half of the columns low, the right half high. So a kernel
    that reads along the bytes gets two contiguous runs of columns and need not interleave them.

    >>> pack_halves(torch.tensor([[1, 2, -1, -8]], dtype=torch.int8)).tolist()
    [[-15, -126]]
    """
    left_XFH, right_XFH = integer_XFD.to(torch.int16).chunk(2, dim=-1)
    byte_XFH = (left_XFH & 15) | ((right_XFH & 15) << 4)
    return torch.where(byte_XFH > 127, byte_XFH - 256, byte_XFH).to(torch.int8)


def unpack_halves(byte_XFH: Tensor) -> Tensor:
    """
    >>> unpack_halves(torch.tensor([[-15, -126]], dtype=torch.int8)).tolist()
    [[1, 2, -1, -8]]
    """
    left_XFH = torch.bitwise_right_shift(torch.bitwise_left_shift(byte_XFH, 4), 4)
    return torch.cat((left_XFH, torch.bitwise_right_shift(byte_XFH, 4)), dim=-1)


def quantize_per_token(x_RD: Tensor) -> QuantizedActivations:
    """Each row by its absolute maximum; a row of zeros stays zero."""
    x_RD = x_RD.float()
    largest_R = x_RD.abs().amax(-1)
    scale_R = largest_R / torch.full_like(largest_R, LIMIT)  # a GPU would multiply by 1 / LIMIT
    safe_R = torch.where(scale_R > 0, scale_R, 1.0)
    integer_RD = (x_RD / safe_R.unsqueeze(-1)).round().clamp(-LIMIT, LIMIT)
    return QuantizedActivations(integer_RD.to(torch.int8), safe_R)


def int_grouped_gemm(
    rows: QuantizedActivations,
    weight: PackedWeight,
    counts_E: Sequence[int] | Tensor,
    dtype: torch.dtype,
    source_R: Tensor | None = None,
) -> Tensor:
    """[R, F]; see the package's contract."""
    rows = rows if source_R is None else rows[source_R]
    counts = counts_E.tolist() if isinstance(counts_E, Tensor) else list(counts_E)
    if sum(counts) != rows.count or len(counts) != weight.integer.shape[0]:
        raise ValueError(f"counts {counts} do not cover {rows.count} rows")
    out_RF = rows.scale_R.new_empty(rows.count, weight.integer.shape[1])
    start = 0
    for expert, count in enumerate(counts):
        own_rows = slice(start, start + count)
        if count:
            one = PackedWeight(weight.integer[expert], weight.scale_XFG[expert], weight.packed)
            out_RF[own_rows] = _product(rows.integer_RD[own_rows], one)
        start += count
    return (out_RF * rows.scale_R.unsqueeze(-1)).to(dtype)


def _product(integer_ND: Tensor, weight: PackedWeight) -> Tensor:
    integer_FD, scale_FG = weight.integer_XFD, weight.scale_XFG
    out_NF: Tensor | None = None
    for g, columns in enumerate(range(0, weight.inputs, weight.group)):
        group = slice(columns, columns + weight.group)
        sum_NF = integer_mm(integer_ND[:, group], integer_FD[:, group]).float() * scale_FG[:, g]
        out_NF = sum_NF if out_NF is None else out_NF + sum_NF
    assert out_NF is not None
    return out_NF


def integer_mm(a_ND: Tensor, b_FD: Tensor) -> Tensor:
    """a @ b.T of int8, exact, in int32."""
    if a_ND.device.type == "cpu" and cpu_multiplies_exactly():
        return torch._int_mm(a_ND, b_FD.T)
    out_NF = a_ND.new_zeros(a_ND.shape[0], b_FD.shape[0], dtype=torch.int32)
    for start in range(0, a_ND.shape[1], EXACT):
        part = slice(start, start + EXACT)
        out_NF += (a_ND[:, part].float() @ b_FD[:, part].float().T).round().int()
    return out_NF


@cache
def cpu_multiplies_exactly() -> bool:
    """Whether int8 products are exact here: older CPUs add pairs in 16 bits, which overflow."""
    a_ND = torch.full((17, 128), 127, dtype=torch.int8)
    b_FD = a_ND.clone()
    b_FD[1::2] = -127
    try:
        product_NF = torch._int_mm(a_ND, b_FD.T)
    except RuntimeError:
        return False
    return torch.equal(product_NF, a_ND.int() @ b_FD.int().T)
