"""Reference of the grouped GEMM. R rows, D inputs, F outputs, E experts; N rows of one expert."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

# Rows multiplied at a time. As fast as whole matrices on a CPU, and one shape for every count.
BLOCK = 32


def grouped_gemm(x_RD: Tensor, weight_EFD: Tensor, counts_E: Sequence[int] | Tensor) -> Tensor:
    """[R, F]; see the package's contract."""
    counts = counts_E.tolist() if isinstance(counts_E, Tensor) else list(counts_E)
    if sum(counts) != x_RD.shape[0] or len(counts) != weight_EFD.shape[0]:
        raise ValueError(f"counts {counts} do not cover {x_RD.shape[0]} rows")
    return _GroupedGemm.apply(x_RD, weight_EFD, counts)  # type: ignore[no-any-return]


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, weight_EFD: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x_RD, weight_EFD)
        ctx.counts = counts
        out_RF = x_RD.new_empty(x_RD.shape[0], weight_EFD.shape[1])
        for e, rows in _experts(counts):
            out_RF[rows] = _by_blocks(x_RD[rows], weight_EFD[e].mT)
        return out_RF

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad_RF,) = grads
        x_RD, weight_EFD = ctx.saved_tensors
        dx_RD = torch.empty_like(x_RD) if ctx.needs_input_grad[0] else None
        dweight_EFD = torch.zeros_like(weight_EFD) if ctx.needs_input_grad[1] else None
        for e, rows in _experts(ctx.counts):
            if dx_RD is not None:
                torch.mm(grad_RF[rows], weight_EFD[e], out=dx_RD[rows])
            if dweight_EFD is not None:
                torch.mm(grad_RF[rows].mT, x_RD[rows], out=dweight_EFD[e])
        return dx_RD, dweight_EFD, None


def _experts(counts: list[int]) -> Iterator[tuple[int, slice]]:
    start = 0
    for e, count in enumerate(counts):
        if count:
            yield e, slice(start, start + count)
        start += count


def _by_blocks(x_ND: Tensor, weight_DF: Tensor) -> Tensor:
    """x @ weight with every block of rows multiplied as the same shape.

    At least two blocks: a batch of one takes another code path, with another rounding.
    """
    N, D = x_ND.shape
    blocks = max(2, -(-N // BLOCK))
    padded = x_ND.new_zeros(blocks * BLOCK, D)
    padded[:N] = x_ND
    out = torch.bmm(padded.view(blocks, BLOCK, D), weight_DF.expand(blocks, *weight_DF.shape))
    return out.flatten(0, 1)[:N]
