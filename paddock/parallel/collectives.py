"""Collectives along a mesh dimension; with one rank they return their input.

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
    """The sum over ranks, bitwise identical on each."""
    if axis.size > 1:
        x = x.clone()
        dist.all_reduce(x, group=axis.group)
    return x


def all_reduce_max(value: int, axis: MeshDim, device: torch.device) -> int:
    if axis.size == 1:
        return value
    result = torch.tensor(value, device=device)
    dist.all_reduce(result, dist.ReduceOp.MAX, group=axis.group)
    return int(result)


def global_norm(norm: Tensor, axis: MeshDim) -> Tensor:
    """The norm of a vector that is sharded over ranks, from the norms of the shards."""
    return norm if axis.size == 1 else all_reduce_sum(norm.square(), axis).sqrt()


def all_gather_rows(x_T: Tensor, sizes: Sequence[int], axis: MeshDim) -> Tensor:
    """All ranks' rows, `sizes` of them, in rank order. The backward pass sums a row's gradients
    over ranks, in rank order."""
    return x_T if axis.size == 1 else _AllGatherRows.apply(x_T, list(sizes), axis)  # type: ignore[no-any-return]


def all_to_all_rows(
    x_R: Tensor, send_N: Sequence[int], receive_N: Sequence[int], axis: MeshDim
) -> Tensor:
    """Exchange rows: the input is sorted by destination rank, the output by source rank. The
    backward pass is the reverse exchange."""
    if axis.size == 1:
        return x_R
    return _AllToAllRows.apply(x_R, list(send_N), list(receive_N), axis)  # type: ignore[no-any-return]


def gather_to_rank_zero(
    rows: Tensor, held: slice, shape: Sequence[int], axis: MeshDim
) -> Tensor | None:
    """A tensor of this shape on rank 0, from ranks that each hold a slice of its rows; None on the
    other ranks."""
    if axis.size == 1:
        return rows
    local_bounds = torch.tensor([held.start, held.stop], device=rows.device)
    bounds = [torch.empty_like(local_bounds) for _ in range(axis.size)]
    dist.all_gather(bounds, local_bounds, group=axis.group)
    slices = [slice(*bound.tolist()) for bound in bounds]
    padded = _pad_rows(rows, max(rows_slice.stop - rows_slice.start for rows_slice in slices))
    result = [torch.empty_like(padded) for _ in slices] if axis.rank == 0 else None
    dist.gather(padded, result, group_dst=0, group=axis.group)
    if result is None:
        return None
    whole = rows.new_empty(*shape)
    for rows_slice, piece in zip(slices, result, strict=True):
        whole[rows_slice] = piece[: rows_slice.stop - rows_slice.start]
    return whole


class _AllGatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_T: Tensor, sizes: list[int], axis: MeshDim) -> Tensor:
        ctx.sizes, ctx.axis = sizes, axis
        padded = _pad_rows(x_T, max(sizes))
        result = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(result, padded, group=axis.group)
        return torch.cat([piece[:size] for piece, size in zip(result, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad_S,) = grads
        local_rows = ctx.sizes[ctx.axis.rank]
        grads_per_rank = _all_to_all(grad_S, ctx.sizes, [local_rows] * ctx.axis.size, ctx.axis)
        return grads_per_rank.view(ctx.axis.size, local_rows, *grad_S.shape[1:]).sum(0), None, None


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_R: Tensor, send_N: list[int], receive_N: list[int], axis: MeshDim
    ) -> Tensor:
        ctx.send_N, ctx.receive_N, ctx.axis = send_N, receive_N, axis
        return _all_to_all(x_R, send_N, receive_N, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.receive_N, ctx.send_N, ctx.axis), None, None, None


def _all_to_all(x_R: Tensor, send_N: list[int], receive_N: list[int], axis: MeshDim) -> Tensor:
    received_R = x_R.new_empty(sum(receive_N), *x_R.shape[1:])
    dist.all_to_all_single(received_R, x_R.contiguous(), receive_N, send_N, group=axis.group)
    return received_R


def _pad_rows(rows: Tensor, count: int) -> Tensor:
    """Pad to the same number of rows on every rank, as collectives need."""
    missing = count - len(rows)
    return F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, missing)) if missing else rows.contiguous()
