"""Permutation kernels. T tokens, K experts of each, R = T * K rows, E experts, D row width."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paddock.kernels.dispatch import can_use_kernel, has_triton, is_enabled

from .reference import ExpertPermutation

BLOCK = 4096  # tokens times experts per program of the counting sort
MAX_EXPERTS = 1024
MAX_ROW_WIDTH = 16_384


def sorts(expert_TK: Tensor, experts: int) -> bool:
    return (
        is_enabled("moe_permute")
        and expert_TK.is_cuda
        and expert_TK.get_device() == torch.cuda.current_device()
        and has_triton()
        and expert_TK.numel() > 0
        and experts <= MAX_EXPERTS
    )


def moves(x: Tensor) -> bool:
    return can_use_kernel("moe_permute", x) and x.numel() > 0 and x.shape[1] <= MAX_ROW_WIDTH


@torch.no_grad()
def sort_by_expert(expert_TK: Tensor, experts: int) -> ExpertPermutation:
    """Counting sort: count per block of tokens, prefix sum, scatter; one kernel for one block."""
    from . import triton as kernels

    T, K = expert_TK.shape
    expert_TK = expert_TK.contiguous()
    width = 1 << max(0, experts - 1).bit_length()
    tokens = min(128, BLOCK // width)
    blocks = -(-T // tokens)
    sizes = {"K": K, "E": experts, "BE": width, "TOKENS": tokens}
    counts_EB = torch.empty(experts, blocks, dtype=torch.int64, device=expert_TK.device)
    slot_TK = torch.empty_like(expert_TK)
    token_R = expert_TK.new_empty(T * K)
    if blocks == 1:
        kernels.sort[(1,)](expert_TK, counts_EB, slot_TK, token_R, T, **sizes)
        return ExpertPermutation(token_R, slot_TK, counts_EB.squeeze(1))
    kernels.count[(blocks,)](expert_TK, counts_EB, T, blocks, **sizes)
    start_EB = counts_EB.flatten().cumsum(0).view_as(counts_EB) - counts_EB
    kernels.place[(blocks,)](expert_TK, start_EB, slot_TK, token_R, T, blocks, **sizes)
    return ExpertPermutation(token_R, slot_TK, counts_EB.sum(1))


def permute(x_TD: Tensor, order: ExpertPermutation) -> Tensor:
    return _Permute.apply(x_TD, order.slot_TK)  # type: ignore[no-any-return]


def unpermute(out_RD: Tensor, weight_TK: Tensor, order: ExpertPermutation) -> Tensor:
    return _Unpermute.apply(out_RD, weight_TK, order.slot_TK)  # type: ignore[no-any-return]


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, slot_TK: Tensor) -> Tensor:
        from . import triton as kernels

        (T, K), D = slot_TK.shape, x_TD.shape[1]
        ctx.save_for_backward(slot_TK)
        x_TD = _with_contiguous_rows(x_TD)
        x_RD = x_TD.new_empty(T * K, D)
        kernels.spread[(T,)](x_TD, slot_TK, x_RD, x_TD.stride(0), K=K, **_width(D))
        return x_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        (slot_TK,) = ctx.saved_tensors
        return _sum(grad_RD, None, slot_TK), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out_RD: Tensor, weight_TK: Tensor, slot_TK: Tensor) -> Tensor:
        out_RD, weight_TK = out_RD.contiguous(), weight_TK.contiguous()
        ctx.save_for_backward(out_RD, weight_TK, slot_TK)
        return _sum(out_RD, weight_TK, slot_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None]:
        from . import triton as kernels

        out_RD, weight_TK, slot_TK = ctx.saved_tensors
        (T, K), D = slot_TK.shape, out_RD.shape[1]
        grad_TD = _with_contiguous_rows(grad_TD)
        dout_RD, dweight_TK = torch.empty_like(out_RD), torch.empty_like(weight_TK)
        kernels.gather_backward[(T,)](
            grad_TD, out_RD, weight_TK, slot_TK, dout_RD, dweight_TK, grad_TD.stride(0),
            K=K, **_width(D),
        )  # fmt: skip
        return dout_RD, dweight_TK, None


def _sum(x_RD: Tensor, weight_TK: Tensor | None, slot_TK: Tensor) -> Tensor:
    """Sum of the rows of each token, weighted if there are weights."""
    from . import triton as kernels

    (T, K), D = slot_TK.shape, x_RD.shape[1]
    x_RD = x_RD.contiguous()
    y_TD = x_RD.new_empty(T, D)
    weights = slot_TK if weight_TK is None else weight_TK
    kernels.add_up[(T,)](
        x_RD, weights, slot_TK, y_TD, K=K, WEIGHTED=weight_TK is not None, **_width(D)
    )
    return y_TD


def _width(D: int) -> dict[str, int]:
    width = 1 << (D - 1).bit_length()
    return {"D": D, "BD": width, "num_warps": 4 if width <= 2048 else 8}


def _with_contiguous_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
