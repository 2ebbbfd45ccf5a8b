"""Sums, gathers and exchanges along an axis. Along an axis of one rank they return their input.

N ranks, T rows of this rank, S rows of all, R rows to send or received.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from paddock.parallel.mesh import MeshDim


def all_reduce_sum(x: Tensor, axis: MeshDim) -> Tensor:
    """The sum over ranks, the same bits on each."""
    if axis.size > 1:
        x = x.clone()
        dist.all_reduce(x, group=axis.group)
    return x


def all_reduce_max(value: int, axis: MeshDim, device: torch.device) -> int:
    if axis.size == 1:
        return value
    found = torch.tensor(value, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=axis.group)
    return int(found)


def global_norm(norm: Tensor, axis: MeshDim) -> Tensor:
    """The norm of a vector whose pieces, one a rank, have these norms."""
    return norm if axis.size == 1 else all_reduce_sum(norm.square(), axis).sqrt()


def all_gather_rows(x_T: Tensor, sizes: Sequence[int], axis: MeshDim) -> Tensor:
    """Every rank's rows, `sizes` of them, in the order of the ranks. A row's gradient is the sum of
    what all ranks want of it, added in the order of the ranks."""
    return x_T if axis.size == 1 else _Gather.apply(x_T, list(sizes), axis)  # type: ignore[no-any-return]


def all_to_all_rows(
    x_R: Tensor, send_N: Sequence[int], receive_N: Sequence[int], axis: MeshDim
) -> Tensor:
    """Rows sorted by the rank they go to, for rows sorted by the rank they came from. Gradients
    travel back the same way."""
    if axis.size == 1:
        return x_R
    return _Exchange.apply(x_R, list(send_N), list(receive_N), axis)  # type: ignore[no-any-return]


def gather_to_rank_zero(
    rows: Tensor, held: slice, shape: Sequence[int], axis: MeshDim
) -> Tensor | None:
    """A tensor of this shape on the first rank, from ranks that each hold a run of its rows; None
    on the others, which keep nothing."""
    if axis.size == 1:
        return rows
    mine = torch.tensor([held.start, held.stop], device=rows.device)
    bounds = [torch.empty_like(mine) for _ in range(axis.size)]
    dist.all_gather(bounds, mine, group=axis.group)
    runs = [slice(*bound.tolist()) for bound in bounds]
    padded = _padded(rows, max(run.stop - run.start for run in runs))
    found = [torch.empty_like(padded) for _ in runs] if axis.rank == 0 else None
    dist.gather(padded, found, group_dst=0, group=axis.group)
    if found is None:
        return None
    whole = rows.new_empty(*shape)
    for run, piece in zip(runs, found, strict=True):
        whole[run] = piece[: run.stop - run.start]
    return whole


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_T: Tensor, sizes: list[int], axis: MeshDim) -> Tensor:
        ctx.sizes, ctx.axis = sizes, axis
        padded = _padded(x_T, max(sizes))
        found = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(found, padded, group=axis.group)
        return torch.cat([piece[:size] for piece, size in zip(found, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad_S,) = grads
        here = ctx.sizes[ctx.axis.rank]
        wanted = _exchanged(grad_S, ctx.sizes, [here] * ctx.axis.size, ctx.axis)
        return wanted.view(ctx.axis.size, here, *grad_S.shape[1:]).sum(0), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_R: Tensor, send_N: list[int], receive_N: list[int], axis: MeshDim
    ) -> Tensor:
        ctx.send_N, ctx.receive_N, ctx.axis = send_N, receive_N, axis
        return _exchanged(x_R, send_N, receive_N, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grads[0], ctx.receive_N, ctx.send_N, ctx.axis), None, None, None


def _exchanged(x_R: Tensor, send_N: list[int], receive_N: list[int], axis: MeshDim) -> Tensor:
    received_R = x_R.new_empty(sum(receive_N), *x_R.shape[1:])
    dist.all_to_all_single(received_R, x_R.contiguous(), receive_N, send_N, group=axis.group)
    return received_R


def _padded(rows: Tensor, count: int) -> Tensor:
    """Collectives want as many rows of every rank."""
    missing = count - len(rows)
    return F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, missing)) if missing else rows.contiguous()
