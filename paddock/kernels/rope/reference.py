"""What the two rotations mean. T tokens, H heads, R rotated dims, P = R / 2 pairs."""

import torch
from torch import Tensor


def rope_interleaved(x_THR: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """Rotate the pairs (0,1), (2,3), ..."""
    even, odd = _rotate(x_THR[..., 0::2], x_THR[..., 1::2], cos_TP, sin_TP)
    return torch.stack((even, odd), dim=-1).flatten(-2).to(x_THR.dtype)


def rope_halves(x_THR: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """Rotate the pairs (0,P), (1,P+1), ..."""
    low, high = x_THR.chunk(2, dim=-1)
    return torch.cat(_rotate(low, high, cos_TP, sin_TP), dim=-1).to(x_THR.dtype)


def _rotate(a: Tensor, b: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos_TP.unsqueeze(1), sin_TP.unsqueeze(1)
    return a * cos - b * sin, a * sin + b * cos
