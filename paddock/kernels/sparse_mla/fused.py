"""Dispatch between the sparse MLA kernels, and their autograd function.

T queries, H heads, C row width, V value columns, S rows, K slots per query.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paddock.kernels.dispatch import has_triton, is_enabled

from .problem import Attended, Problem

MAX_WIDTH = 512
# Widths the Hopper kernels tile: values in two halves of at least one swizzled row, and the rest.
HOPPER_VALUES, HOPPER_RESTS = (128, 256, 512), (16, 32, 64, 128)
# Bytes of shared memory that a Hopper kernel may fill.
HOPPER_BYTES = 232_448
# With fewer heads, neighbouring queries share a Hopper tile.
HOPPER_HEADS = 33
# Merged lists are short if neighbours select the same keys, as in trained models: with 16 heads the
# Hopper forward took 2.2 ms, Triton 3.8 (small, 8 x 4K, H200); with independent selections at 32K
# 5.6 and 4.2.
MIN_HOPPER_HEADS = 8
# An entry of a merged list holds a row and eight more bits.
HOPPER_ROWS = 1 << 23


def suits(problem: Problem) -> bool:
    """Whether a kernel supports this problem: bfloat16 on a GPU, at most 512 value columns."""
    query_THC, row_SC = problem.query_THC, problem.row_SC
    return (
        query_THC.is_cuda
        and is_enabled("sparse_mla")
        and query_THC.dtype == row_SC.dtype == torch.bfloat16
        and 0 < problem.value <= MAX_WIDTH
        and problem.rest <= MAX_WIDTH
        and query_THC.numel() > 0
        and problem.index_TK.shape[1] > 0
        and has_triton()
    )


def hopper(problem: Problem) -> bool:
    """Whether the Hopper kernels support this problem."""
    V, R = problem.value, problem.rest
    # Forward: 64 rows of queries, two tiles of 64 keys, probabilities. Backward: queries, one tile
    # of keys, output gradients, probabilities and their gradients.
    forward, backward = 3 * 128 * (V + R) + (11 << 10), 128 * (3 * V + 2 * R) + (18 << 10)
    return (
        V in HOPPER_VALUES
        and R in HOPPER_RESTS
        and max(forward, backward) <= HOPPER_BYTES
        and (problem.query_THC.shape[1] >= HOPPER_HEADS or len(problem.row_SC) <= HOPPER_ROWS)
        and _is_hopper(problem.row_SC.device.index)
    )


@cache
def _is_hopper(device: int) -> bool:
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        from . import gluon, gluon_backward  # noqa: F401
    except (ImportError, AttributeError):  # a Triton without Gluon, or with another one
        return False
    return True


def sparse_mla(problem: Problem, *, deterministic: bool) -> Tensor:
    """[T, H, V] in the query's dtype; see the package's contract."""
    aligned = replace(
        problem,
        query_THC=_aligned(problem.query_THC),
        row_SC=_aligned(problem.row_SC),
        index_TK=_aligned(problem.index_TK.int()),
    )
    return _SparseMLA.apply(aligned.query_THC, aligned.row_SC, aligned, deterministic)  # type: ignore[no-any-return]


def _aligned(x: Tensor) -> Tensor:
    """Contiguous, from an address that 16-byte copies can start at."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


class _SparseMLA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query_THC: Tensor, row_SC: Tensor, problem: Problem, deterministic: bool
    ) -> Tensor:
        """Queries and rows are separate arguments so that autograd sees them."""
        with torch.cuda.device(query_THC.device):  # where Triton launches
            attended = forward(problem)
        ctx.save_for_backward(
            query_THC, row_SC, problem.index_TK, attended.out_THV, attended.lse_TH
        )
        ctx.scale, ctx.value, ctx.deterministic = problem.scale, problem.value, deterministic
        return attended.out_THV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        query_THC, row_SC, index_TK, out_THV, lse_TH = ctx.saved_tensors
        problem = Problem(query_THC, row_SC, index_TK, ctx.scale, ctx.value)
        attended, grad_THV = Attended(out_THV, lse_TH), _aligned(grads[0])
        with torch.cuda.device(query_THC.device):
            dquery_THC, drow_SC = backward(
                problem, attended, grad_THV, deterministic=ctx.deterministic
            )
        return dquery_THC, drow_SC, None, None


def forward(problem: Problem) -> Attended:
    """Forward by the kernel that is fastest for this shape."""
    if hopper(problem) and problem.query_THC.shape[1] >= MIN_HOPPER_HEADS:
        from . import gluon

        return gluon.forward(problem)
    from . import triton

    return triton.forward(problem)


def backward(
    problem: Problem, attended: Attended, grad_THV: Tensor, *, deterministic: bool
) -> tuple[Tensor, Tensor]:
    """Backward by the kernel that is fastest for this shape, whichever ran forward."""
    if hopper(problem):
        from . import gluon_backward

        return gluon_backward.backward(problem, attended, grad_THV, deterministic=deterministic)
    from . import triton

    return triton.backward(problem, attended, grad_THV, deterministic=deterministic)
