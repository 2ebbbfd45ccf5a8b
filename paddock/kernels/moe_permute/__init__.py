"""Rows by expert, and back to tokens.

    by_expert(expert_TK, experts)          -> Order
    spread(x_TD, order)                    -> x_RD   each token's row once for each of its experts
    gather(answer_RD, weight_TK, order)    -> y_TD   sum over a token's answers, weighted
    load_of(expert_TK, experts)            -> how many rows each expert receives, int64

Rows are sorted by expert, those of one expert by token: R = T * K. A token's experts differ from
each other. Sums run in a fixed order, forward and backward: no atomics, the same bits every time.

`reference` is the definition; on a GPU the order never visits the host, and halves move by `fused`,
which adds in float32 and rounds once.
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


def unpermute(answer_RD: Tensor, weight_TK: Tensor, order: ExpertPermutation) -> Tensor:
    if fused.moves(answer_RD):
        return fused.unpermute(answer_RD, weight_TK, order)
    return reference.unpermute(answer_RD, weight_TK, order)


__all__ = ["ExpertPermutation", "count_tokens_per_expert", "permute", "sort_by_expert", "unpermute"]
