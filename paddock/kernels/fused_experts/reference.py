"""Reference of routed experts.

T tokens, K experts of each, R = T * K rows, E experts, D hidden, F inner, G = 2 F.
"""

import torch
from torch import Tensor

from paddock.kernels.swiglu.reference import swiglu


def fused_experts(
    x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor
) -> Tensor:
    T, K = expert_TK.shape
    expert_R = expert_TK.flatten()
    x_RD1 = (x_TD if T == 1 else x_TD.repeat_interleave(K, 0)).unsqueeze(-1)
    # Not stack[expert]: index_select copies whole matrices and is several times faster.
    gate_up_RGD = gate_up_EGD.index_select(0, expert_R)
    both_RG1 = torch.bmm(gate_up_RGD, x_RD1.expand(T * K, -1, 1))
    inner_RF1 = swiglu(*both_RG1.chunk(2, dim=1))
    out_RD1 = torch.bmm(down_EDF.index_select(0, expert_R), inner_RF1)
    weight_T1K = weight_TK.to(x_TD.dtype).unsqueeze(1)
    return torch.bmm(weight_T1K, out_RD1.view(T, K, -1)).squeeze(1)
