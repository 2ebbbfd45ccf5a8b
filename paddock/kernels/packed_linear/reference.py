"""Reference of the packed linear layers, on unpacked weights. T tokens, D inputs, F outputs."""

import torch
from torch import Tensor
from torch.nn import functional as F

PANEL = 64


def packed_linear(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None, *, fp32: bool) -> Tensor:
    out_TF = F.linear(x_TD, weight_FD, bias_F)
    return out_TF.float() if fp32 else out_TF


def packed_gate_up(x_TD: Tensor, weight_FD: Tensor, inner: int) -> Tensor:
    pairs_TPJ = F.linear(x_TD, weight_FD).unflatten(1, (-1, 2, PANEL))
    gate_TF, up_TF = (pairs_TPJ[:, :, i].flatten(1)[:, :inner] for i in range(2))
    return F.silu(gate_TF) * up_TF


def packed_stack(x_THD: Tensor, weight_HFD: Tensor) -> Tensor:
    return torch.einsum("thd,hfd->thf", x_THD, weight_HFD)
