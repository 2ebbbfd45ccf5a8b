"""Symmetric int4 and int8 weight quantization, shared by QAT, scale search and export.

A weight is an integer times the scale of its group; a group is a row of the matrix or a block of
consecutive columns of a row. X any leading dims, F outputs, D inputs, G groups of a row, C columns
of a group, N rows of inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paddock.kernels.w4a8_gemm import PackedWeight, pack_halves

WORD = 8  # int4 values per int32 word


class QuantError(ValueError):
    """A request that quantization cannot satisfy; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationArgs:
    """Bits, group size and scale refinement of a quantized weight."""

    bits: int = 4
    group_size: int | None = None  # columns per scale; None: one scale per row
    ssz_iterations: int = 0  # SSZ rounds; 0: the largest magnitude of a group sets its scale

    @property
    def qmax(self) -> int:
        """The largest magnitude: symmetric, so -8 is not used.

        >>> QuantizationArgs(bits=4).qmax, QuantizationArgs(bits=8).qmax
        (7, 127)
        """
        return 2 ** (self.bits - 1) - 1

    def group_columns(self, inputs: int) -> int:
        """Columns per group of a matrix with `inputs` columns; QuantError if it does not divide."""
        group = self.group_size or inputs
        if inputs % group:
            raise QuantError(f"{inputs} columns do not divide into groups of {group}")
        return group


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """Integers and the scales of their groups."""

    integer_XFD: Tensor  # int8
    scale_XFG: Tensor  # float32
    bits: int

    @property
    def dequantized_XFD(self) -> Tensor:
        """integer * scale, in float32."""
        groups = self.scale_XFG.shape[-1]
        integer_XFGC = self.integer_XFD.float().unflatten(-1, (groups, -1))
        return (integer_XFGC * self.scale_XFG.unsqueeze(-1)).flatten(-2)

    def pack(self) -> PackedWeight:
        """In the layout of the integer GEMM."""
        if self.bits == 8:
            return PackedWeight(self.integer_XFD, self.scale_XFG, packed=False)
        return PackedWeight(pack_halves(self.integer_XFD), self.scale_XFG, packed=True)


@torch.no_grad()
def quantize(
    weight_XFD: Tensor, args: QuantizationArgs, rows_XND: Tensor | None = None
) -> QuantizedTensor:
    """Round to nearest, ties to even, in float32. Deterministic: the same weights give the same
    integers in training, search and export.

    Scale refinement minimizes the error of outputs for the inputs `rows_XND` of each matrix [F, D],
    or the error of the weights if there are none.

    >>> found = quantize(torch.tensor([[0.7, -0.34, 0.05]]), QuantizationArgs(bits=4))
    >>> found.integer_XFD.tolist()
    [[7, -3, 0]]
    """
    columns = args.group_columns(weight_XFD.shape[-1])
    weight_XFGC = weight_XFD.detach().float().unflatten(-1, (-1, columns))
    largest_XFG1 = weight_XFGC.abs().amax(-1, keepdim=True)
    qmax_XFG1 = torch.full_like(
        largest_XFG1, args.qmax
    )  # a tensor: with a scalar a GPU would multiply by 1 / qmax
    scale_XFG1 = largest_XFG1 / qmax_XFG1
    # For a group of zeros, or whose scale underflows, any scale will do.
    scale_XFG1 = torch.where(scale_XFG1 > 0, scale_XFG1, 1.0)
    integer_XFGC = _round(weight_XFGC, scale_XFG1, args.qmax)
    if args.ssz_iterations:
        project = _identity if rows_XND is None else _project_rows(rows_XND, columns)
        scale_XFG1, integer_XFGC = _refine_scales(
            weight_XFGC, scale_XFG1, integer_XFGC, args, project
        )
    return QuantizedTensor(
        integer_XFGC.flatten(-2).to(torch.int8), scale_XFG1.squeeze(-1), args.bits
    )


def _round(weight_XFGC: Tensor, scale_XFG1: Tensor, qmax: int) -> Tensor:
    return (weight_XFGC / scale_XFG1).round_().clamp_(-qmax, qmax)


Projection = Callable[[Tensor], Tensor]


def _identity(weight_XFGC: Tensor) -> Tensor:
    return weight_XFGC


def _project_rows(rows_XND: Tensor, columns: int) -> Projection:
    """The contribution of each group of a matrix to the outputs for these rows."""
    rows_XGCN = rows_XND.float().unflatten(-1, (-1, columns)).transpose(-3, -2).mT

    def project(weight_XFGC: Tensor) -> Tensor:
        return (weight_XFGC.transpose(-3, -2) @ rows_XGCN).transpose(-3, -2)

    return project


def _refine_scales(
    weight_XFGC: Tensor,
    scale_XFG1: Tensor,
    integer_XFGC: Tensor,
    args: QuantizationArgs,
    project: Projection,
) -> tuple[Tensor, Tensor]:
    """SSZ: alternate between the least-squares scale for the integers and the nearest integers for
    the scale. A group takes a result only if its error falls; a matrix stops when no group does."""
    expected, projected = project(weight_XFGC), project(integer_XFGC)
    error_XFG1 = (expected - scale_XFG1 * projected).square().sum(-1, keepdim=True)
    next_scale_XFG1, next_XFGC = scale_XFG1, integer_XFGC
    active_X111: Tensor | bool = True
    for _ in range(args.ssz_iterations):
        numerator_XFG1 = (projected * expected).sum(-1, keepdim=True)
        denominator_XFG1 = projected.square().sum(-1, keepdim=True)
        fitted_XFG1 = torch.where(denominator_XFG1 > 0, numerator_XFG1 / denominator_XFG1, 0.0)
        # The least-squares scale may be zero where the rows do not excite the weights.
        next_scale_XFG1 = torch.where(fitted_XFG1 > 0, fitted_XFG1, next_scale_XFG1)
        next_XFGC = _round(weight_XFGC, next_scale_XFG1, args.qmax)
        projected = project(next_XFGC)
        new_error_XFG1 = (expected - next_scale_XFG1 * projected).square().sum(-1, keepdim=True)
        closer_XFG1 = (new_error_XFG1 < error_XFG1 * (1 - 1e-10)) & active_X111
        active_X111 = closer_XFG1.any((-3, -2, -1), keepdim=True)
        if not active_X111.any():
            break
        scale_XFG1 = torch.where(closer_XFG1, next_scale_XFG1, scale_XFG1)
        integer_XFGC = torch.where(closer_XFG1, next_XFGC, integer_XFGC)
        error_XFG1 = torch.where(closer_XFG1, new_error_XFG1, error_XFG1)
    return scale_XFG1, integer_XFGC


def pack_words(integer_FD: Tensor) -> Tensor:
    """Pack eight int4 values into an int32, lowest bits first, each offset by eight: the
    pack-quantized layout of compressed-tensors.

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
    """The inverse of `pack_words`.

    >>> unpack_words(torch.tensor([[3856]], dtype=torch.int32), 3).tolist()
    [[-8, -7, 7]]
    """
    shift_8 = 4 * torch.arange(WORD, dtype=torch.int32, device=word_FW.device)
    value_FW8 = (word_FW.unsqueeze(-1) >> shift_8) & 15
    return (value_FW8.flatten(1)[:, :columns] - 8).to(torch.int8)
