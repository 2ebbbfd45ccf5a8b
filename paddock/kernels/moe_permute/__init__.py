"""Permute token rows by expert, and unpermute expert outputs to tokens.

    sort_by_expert(expert_TK, experts)           -> ExpertPermutation
    permute(x_TD, order)                         -> x_RD  a token's row for each of its experts
    unpermute(out_RD, weight_TK, order)          -> y_TD  weighted sum over a token's outputs
    count_tokens_per_expert(expert_TK, experts)  -> number of rows of each expert, int64

Rows are sorted by expert, those of one expert by token: R = T * K. A token's experts differ from
each other. Sums run in a fixed order, forward and backward: no atomics, bitwise deterministic.

`reference` is the definition; on a GPU there is no host sync, and halves use the `fused` kernels,
which add in float32 and round once.
"""

from torch import Tensor

from . import fused, reference
from .reference import ExpertPermutation, count_tokens_per_expert


def sort_by_expert(expert_TK: Tensor, experts: int) -> ExpertPermutation:
    if fused.sorts(expert_TK, experts):
        return fused.sort_by_expert(expert_TK, experts)
    return reference.sort_by_expert(expert_TK, experts)


def permute(x_TD: Tensor, order: ExpertPermutation) -> Tensor:
    if fused.moves(x_TD):
        return fused.permute(x_TD, order)
    return reference.permute(x_TD, order)


def unpermute(out_RD: Tensor, weight_TK: Tensor, order: ExpertPermutation) -> Tensor:
    if fused.moves(out_RD):
        return fused.unpermute(out_RD, weight_TK, order)
    return reference.unpermute(out_RD, weight_TK, order)


__all__ = ["ExpertPermutation", "count_tokens_per_expert", "permute", "sort_by_expert", "unpermute"]
