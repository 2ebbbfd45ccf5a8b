"""What it means to sort rows by expert. T tokens, K experts of each, R = T * K rows of D."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Rows sorted by expert."""

    token_R: Tensor  # whose row it is
    slot_TK: Tensor  # where a token's rows are
    counts_E: Tensor  # how many rows each expert has, int64


def by_expert(expert_TK: Tensor, experts: int) -> Order:
    T, K = expert_TK.shape
    order_R = expert_TK.flatten().argsort(stable=True)
    return Order(order_R // K, order_R.argsort().view(T, K), load_of(expert_TK, experts))


def spread(x_TD: Tensor, order: Order) -> Tensor:
    return x_TD[order.token_R]


def gather(answer_RD: Tensor, weight_TK: Tensor, order: Order) -> Tensor:
    # Back to token order, then a sum of fixed order: no atomics, the same bits every time.
    T, K = weight_TK.shape
    answer_TKD = answer_RD[order.slot_TK.flatten()].view(T, K, -1)
    return torch.einsum("tkd,tk->td", answer_TKD, weight_TK.to(answer_TKD.dtype))


def load_of(expert_TK: Tensor, experts: int) -> Tensor:
    """How many rows each expert receives; on an accelerator without asking the host, as bincount
    would."""
    expert_R = expert_TK.flatten()
    if expert_R.device.type == "cpu":
        return expert_R.bincount(minlength=experts)
    zeros = torch.zeros(experts, dtype=torch.int64, device=expert_R.device)
    return zeros.scatter_add_(0, expert_R, torch.ones_like(expert_R))
