"""Deterministic top-k experts of each token.

    expert_topk(score_TE, k) -> index_TK  int64
    route_experts(logit_TE, bias_E, k, normalize=..., scale=...) -> expert_TK, weight_TK, score_TE

The k best of each row by float32 score, ascending; of equal scores the lowest index wins; NaN ranks
last, and -0.0 ties with 0.0. `topk` has the same rule for many keys and is the reference;
`route_experts` is a router's sigmoid, selection and weights in one call of the CPU kernels;
on a GPU rows of at most MAX_EXPERTS scores use the `fused` kernel, which never syncs with the host.
"""

from torch import Tensor

from paddock.kernels.expert_topk import fused
from paddock.kernels.topk import topk_indices

from .cpu import route_experts


def expert_topk(score_TE: Tensor, k: int) -> Tensor:
    if fused.suits(score_TE, k):
        return fused.expert_topk(score_TE, k)
    return topk_indices(score_TE, k)


__all__ = ["expert_topk", "route_experts"]
