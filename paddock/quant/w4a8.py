"""Weights as integers: one function for training, scoring and export.

Symmetric: a weight is its integer times the scale of its group, a group being a row of the matrix
or a run of a row's columns. X any leading dims, F outputs, D inputs, G groups of a row, C columns
of a group, N rows of inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paddock.kernels.w4a8_gemm import PackedWeight, pack_halves

WORD = 8  # int4 values of an int32 word


class QuantError(ValueError):
    """A request that quantization cannot satisfy; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationArgs:
    """Which numbers a weight may become."""

    bits: int = 4
    group_size: int | None = None  # columns that share a scale; None: a whole row
    ssz_iterations: int = 0  # rounds of SSZ; 0: the largest number of a group sets its scale

    @property
    def qmax(self) -> int:
        """The largest integer, and the smallest: symmetric, -8 is left unused.

        >>> QuantizationArgs(bits=4).qmax, QuantizationArgs(bits=8).qmax
        (7, 127)
        """
        return 2 ** (self.bits - 1) - 1

    def group_columns(self, inputs: int) -> int:
        """Columns of a group in a matrix of so many."""
        group = self.group_size or inputs
        if inputs % group:
            raise QuantError(f"{inputs} columns do not divide into groups of {group}")
        return group


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    integer_XFD: Tensor  # int8
    scale_XFG: Tensor  # float32
    bits: int

    @property
    def dequantized_XFD(self) -> Tensor:
        """What the integers stand for, in float32."""
        groups = self.scale_XFG.shape[-1]
        integer_XFGC = self.integer_XFD.float().unflatten(-1, (groups, -1))
        return (integer_XFGC * self.scale_XFG.unsqueeze(-1)).flatten(-2)

    def pack(self) -> PackedWeight:
        """As a product of integers wants it."""
        if self.bits == 8:
            return PackedWeight(self.integer_XFD, self.scale_XFG, packed=False)
        return PackedWeight(pack_halves(self.integer_XFD), self.scale_XFG, packed=True)


@torch.no_grad()
def quantize(
    weight_XFD: Tensor, grid: QuantizationArgs, rows_XND: Tensor | None = None
) -> QuantizedTensor:
    """Round to the nearest, halves to even, in float32. Deterministic: the same weights give the
    same integers wherever this is called from.

    Refining scales takes `rows_XND`, inputs that each matrix [F, D] will meet: what then counts is
    how far outputs are, and without them how far weights are.

    >>> found = quantize(torch.tensor([[0.7, -0.34, 0.05]]), QuantizationArgs(bits=4))
    >>> found.integer_XFD.tolist()
    [[7, -3, 0]]
    """
    columns = grid.group_columns(weight_XFD.shape[-1])
    weight_XFGC = weight_XFD.detach().float().unflatten(-1, (-1, columns))
    largest_XFG1 = weight_XFGC.abs().amax(-1, keepdim=True)
    limit_XFG1 = torch.full_like(largest_XFG1, grid.qmax)  # a GPU would multiply by 1 / limit
    scale_XFG1 = largest_XFG1 / limit_XFG1
    # A group of zeros, or of what divides to zero, has no scale of its own, and any will do.
    scale_XFG1 = torch.where(scale_XFG1 > 0, scale_XFG1, 1.0)
    integer_XFGC = _rounded(weight_XFGC, scale_XFG1, grid.qmax)
    if grid.ssz_iterations:
        view = _same if rows_XND is None else _outputs(rows_XND, columns)
        scale_XFG1, integer_XFGC = _refined(weight_XFGC, scale_XFG1, integer_XFGC, grid, view)
    return QuantizedTensor(
        integer_XFGC.flatten(-2).to(torch.int8), scale_XFG1.squeeze(-1), grid.bits
    )


def _rounded(weight_XFGC: Tensor, scale_XFG1: Tensor, limit: int) -> Tensor:
    return (weight_XFGC / scale_XFG1).round_().clamp_(-limit, limit)


View = Callable[[Tensor], Tensor]


def _same(weight_XFGC: Tensor) -> Tensor:
    return weight_XFGC


def _outputs(rows_XND: Tensor, columns: int) -> View:
    """What each group of a matrix adds to the outputs of some rows."""
    rows_XGCN = rows_XND.float().unflatten(-1, (-1, columns)).transpose(-3, -2).mT

    def view(weight_XFGC: Tensor) -> Tensor:
        return (weight_XFGC.transpose(-3, -2) @ rows_XGCN).transpose(-3, -2)

    return view


def _refined(
    weight_XFGC: Tensor,
    scale_XFG1: Tensor,
    integer_XFGC: Tensor,
    grid: QuantizationArgs,
    view: View,
) -> tuple[Tensor, Tensor]:
    """SSZ: the best scale for the integers, the nearest integers for the scale, in turn; a group
    takes a round's result only if it is closer, and a matrix stops when none of its groups is."""
    wanted, seen = view(weight_XFGC), view(integer_XFGC)
    error_XFG1 = (wanted - scale_XFG1 * seen).square().sum(-1, keepdim=True)
    next_scale_XFG1, next_XFGC = scale_XFG1, integer_XFGC
    going_X111: Tensor | bool = True
    for _ in range(grid.ssz_iterations):
        over_XFG1 = (seen * wanted).sum(-1, keepdim=True)
        under_XFG1 = seen.square().sum(-1, keepdim=True)
        fitted_XFG1 = torch.where(under_XFG1 > 0, over_XFG1 / under_XFG1, 0.0)
        # Least squares may shrink a scale to nothing where rows see nothing of the weights.
        next_scale_XFG1 = torch.where(fitted_XFG1 > 0, fitted_XFG1, next_scale_XFG1)
        next_XFGC = _rounded(weight_XFGC, next_scale_XFG1, grid.qmax)
        seen = view(next_XFGC)
        found_XFG1 = (wanted - next_scale_XFG1 * seen).square().sum(-1, keepdim=True)
        closer_XFG1 = (found_XFG1 < error_XFG1 * (1 - 1e-10)) & going_X111
        going_X111 = closer_XFG1.any((-3, -2, -1), keepdim=True)
        if not going_X111.any():
            break
        scale_XFG1 = torch.where(closer_XFG1, next_scale_XFG1, scale_XFG1)
        integer_XFGC = torch.where(closer_XFG1, next_XFGC, integer_XFGC)
        error_XFG1 = torch.where(closer_XFG1, found_XFG1, error_XFG1)
    return scale_XFG1, integer_XFGC


def pack_words(integer_FD: Tensor) -> Tensor:
    """int4 values eight to an int32, the first lowest, each as its value plus eight: what the
    compressed-tensors format calls pack-quantized.

    >>> pack_words(torch.tensor([[-8, -7, 7]], dtype=torch.int8)).tolist()
    [[3856]]
    """
    rows, columns = integer_FD.shape
    padded = -(-columns // WORD) * WORD
    value_FW8 = torch.zeros(rows, padded, dtype=torch.int64, device=integer_FD.device)
    value_FW8[:, :columns] = integer_FD.long() + 8
    shift_8 = 4 * torch.arange(WORD, device=integer_FD.device)
    word_FW = (value_FW8.unflatten(1, (-1, WORD)) << shift_8).sum(-1)
    return torch.where(word_FW >= 2**31, word_FW - 2**32, word_FW).to(torch.int32)


def unpack_words(word_FW: Tensor, columns: int) -> Tensor:
    """
    >>> unpack_words(torch.tensor([[3856]], dtype=torch.int32), 3).tolist()
    [[-8, -7, 7]]
    """
    shift_8 = 4 * torch.arange(WORD, dtype=torch.int32, device=word_FW.device)
    value_FW8 = (word_FW.unsqueeze(-1) >> shift_8) & 15
    return (value_FW8.flatten(1)[:, :columns] - 8).to(torch.int8)
