"""Routing of tokens to experts with the CPU kernels. T tokens, E experts, K routed per token."""

import torch
from torch import Tensor

from paddock.kernels import cpu


def route_experts(
    logit_TE: Tensor, bias_E: Tensor, k: int, *, normalize: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Selected experts [T, K], ascending, their weights [T, K], and sigmoid scores [T, E].

    The k best by score plus bias are selected; of equal ones the lowest index wins.
    """
    T, E = logit_TE.shape
    logit_TE = logit_TE.contiguous()
    score_TE, weight_TK = torch.empty_like(logit_TE), logit_TE.new_empty(T, k)
    expert_TK = torch.empty(T, k, dtype=torch.int64)
    cpu.loaded().route_experts(
        *(T, E, k, logit_TE.data_ptr(), bias_E.data_ptr(), normalize, scale),
        *(score_TE.data_ptr(), expert_TK.data_ptr(), weight_TK.data_ptr()),
    )
    return expert_TK, weight_TK, score_TE
