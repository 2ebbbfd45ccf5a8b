"""Linear layer.

    linear(x_TD, weight_FD, bias_F=None) -> x @ weight.T + bias

`torch.nn.functional.linear` is the definition and runs everywhere but in float32 training on a CPU
whose kernels are loaded.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from paddock.kernels import cpu
from paddock.kernels.cpu import training


def linear(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
    trains = x_TD.dtype == torch.float32 and torch.is_grad_enabled() and x_TD.ndim == 2
    if not (trains and cpu.suits_training(x_TD, weight_FD)):
        return F.linear(x_TD, weight_FD, bias_F)
    out_TF = training.linear(x_TD, weight_FD)
    return out_TF if bias_F is None else out_TF + bias_F


__all__ = ["linear"]
