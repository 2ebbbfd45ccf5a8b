"""Reference of the permutation by expert. T tokens, K experts of each, R = T * K rows of D."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paddock.kernels.precision import opmath_dtype


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPermutation:
    """Rows sorted by expert."""

    token_R: Tensor  # token of each row
    slot_TK: Tensor  # rows of each token
    counts_E: Tensor  # number of rows of each expert, int64


def sort_by_expert(expert_TK: Tensor, experts: int) -> ExpertPermutation:
    T, K = expert_TK.shape
    order_R = expert_TK.flatten().argsort(stable=True)
    return ExpertPermutation(
        order_R // K, order_R.argsort().view(T, K), count_tokens_per_expert(expert_TK, experts)
    )


def permute(x_TD: Tensor, order: ExpertPermutation) -> Tensor:
    return _Permute.apply(x_TD, order)  # type: ignore[no-any-return]


def unpermute(out_RD: Tensor, weight_TK: Tensor, order: ExpertPermutation) -> Tensor:
    out_TKD = _Unpermute.apply(out_RD, order)
    weight_TK = weight_TK.to(out_TKD.dtype)
    if out_TKD.device.type == "cpu" and out_TKD.dtype == opmath_dtype(out_TKD.dtype):
        # Several times faster than einsum; halves would be rounded in between.
        return (out_TKD * weight_TK.unsqueeze(-1)).sum(1)
    return torch.einsum("tkd,tk->td", out_TKD, weight_TK)


class _Permute(torch.autograd.Function):
    """Backward sums in a fixed order without atomics: bitwise deterministic."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order: ExpertPermutation) -> Tensor:
        ctx.order = order
        return x_TD.index_select(0, order.token_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        return _by_token(grad_RD, ctx.order).sum(1), None


class _Unpermute(torch.autograd.Function):
    """Rows back in the order of tokens."""

    @staticmethod
    def forward(ctx: Any, out_RD: Tensor, order: ExpertPermutation) -> Tensor:
        ctx.order = order
        return _by_token(out_RD, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TKD: Tensor) -> tuple[Tensor, None]:
        grad_RD = grad_TKD.new_empty(len(ctx.order.token_R), grad_TKD.shape[-1])
        grad_RD[ctx.order.slot_TK.flatten()] = grad_TKD.flatten(0, 1)
        return grad_RD, None


def _by_token(x_RD: Tensor, order: ExpertPermutation) -> Tensor:
    slot_TK = order.slot_TK
    return x_RD.index_select(0, slot_TK.flatten()).view(*slot_TK.shape, -1)


def count_tokens_per_expert(expert_TK: Tensor, experts: int) -> Tensor:
    """Number of rows of each expert; on an accelerator without the host sync of bincount."""
    expert_R = expert_TK.flatten()
    if expert_R.device.type == "cpu":
        return expert_R.bincount(minlength=experts)
    zeros = torch.zeros(experts, dtype=torch.int64, device=expert_R.device)
    return zeros.scatter_add_(0, expert_R, torch.ones_like(expert_R))
