"""Dispatch of the fused experts kernel. T tokens, K experts of each, R = T * K rows, E experts,
D hidden, F inner."""

import torch
from torch import Tensor

from paddock.kernels.dispatch import can_use_kernel
from paddock.kernels.workspace import scratch_bytes

# Against the grouped GEMM on one H200 (2026-11-19): 1.5x at 64 to 512 rows and 1.08x at 4,096 for
# GLM-5's experts, 1.9 to 3.4x for those of small. More rows have not been measured.
MAX_ROWS = 4096
# Gathered weights / grouped GEMM on a CPU core: 35 / 224 us for 1 token of nano,
# 330 / 623 for 16 (four rows per expert); 9 / 11 ms for 1 token of small, whose four experts no
# longer fit the scratch, and 83 / 38 ms for 4.
CPU_ROWS_PER_EXPERT = 4


def is_supported(x_TD: Tensor, expert_TK: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor) -> bool:
    """Whether the tokens are few enough and no gradients are needed."""
    if torch.is_grad_enabled() or not 0 < expert_TK.numel() <= MAX_ROWS:
        return False
    if x_TD.device.type == "cpu":
        rows, stacks = expert_TK.numel(), (gate_up_EGD, down_EDF)
        row_bytes = sum(stack[0].numel() * stack.element_size() for stack in stacks)
        few = rows <= CPU_ROWS_PER_EXPERT * len(gate_up_EGD)
        return few and rows * row_bytes <= scratch_bytes(x_TD.device)
    return can_use_kernel("fused_experts", x_TD, gate_up_EGD, down_EDF)


def fused_experts(
    x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor
) -> Tensor:
    from paddock.kernels.fused_experts import triton as kernels
    from paddock.kernels.moe_permute import triton as permute

    (T, K), (E, D, F) = expert_TK.shape, down_EDF.shape
    x_TD, expert_TK = x_TD.contiguous(), expert_TK.contiguous()
    assert gate_up_EGD.is_contiguous() and down_EDF.is_contiguous()
    work = kernels.plan(expert_TK.view(-1), E)
    inner_RF = x_TD.new_empty(T * K, F)
    kernels.gate_and_up(x_TD, gate_up_EGD, work, inner_RF, K)
    out_RD = x_TD.new_empty(T * K, D)
    kernels.down(inner_RF, down_EDF, work, out_RD)
    # Rows are in the order of tokens: no unpermute is needed.
    slot_TK = torch.arange(T * K, device=x_TD.device).view(T, K)
    y_TD = torch.empty_like(x_TD)
    width = 1 << (D - 1).bit_length()
    permute.add_up[(T,)](
        out_RD, weight_TK.contiguous(), slot_TK, y_TD, K=K, WEIGHTED=True, D=D, BD=width,
        num_warps=4 if width <= 2048 else 8,
    )  # fmt: skip
    return y_TD
