"""RMSNorm and LayerNorm modules over the norm kernels."""

import torch
from torch import Tensor, nn

from paddock.kernels.norm import layer_norm, rms_norm


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self.weight, self.eps)


class LayerNorm(nn.Module):
    """LayerNorm with bias, used only for the indexer's keys."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x_TD: Tensor) -> Tensor:
        return layer_norm(x_TD, self.weight, self.bias, self.eps)
