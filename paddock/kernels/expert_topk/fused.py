"""Dispatch of the top-k experts kernel. T tokens, E experts, K of them selected."""

import torch
from torch import Tensor

from paddock.kernels.dispatch import has_triton, is_enabled

MAX_EXPERTS = 1024
BLOCK = 4096  # scores a program holds at once


def suits(score_TE: Tensor, k: int) -> bool:
    T, E = score_TE.shape
    return (
        is_enabled("expert_topk")
        and score_TE.is_cuda
        and score_TE.get_device() == torch.cuda.current_device()
        and has_triton()
        and T > 0
        and 0 < k < E <= MAX_EXPERTS
    )


@torch.no_grad()
def expert_topk(score_TE: Tensor, k: int) -> Tensor:
    from paddock.kernels.expert_topk import triton as kernels

    T, E = score_TE.shape
    score_TE = score_TE.float().contiguous()
    index_TK = torch.empty(T, k, dtype=torch.int64, device=score_TE.device)
    width = 1 << (E - 1).bit_length()
    rows = max(1, BLOCK // width)
    kernels.choose[(-(-T // rows),)](score_TE, index_TK, T, E=E, K=k, BE=width, ROWS=rows)
    return index_TK
