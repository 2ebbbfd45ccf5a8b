"""What the two rotations mean. T tokens, H heads, R rotated dims, P = R / 2 pairs."""

import torch
from torch import Tensor


def rope_interleaved(x_THR: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """Rotate the pairs (0,1), (2,3), ...: each is a complex number, turned by the angle."""
    dtype = torch.promote_types(x_THR.dtype, cos_TP.dtype)
    pair_THP = torch.view_as_complex(x_THR.to(dtype).unflatten(-1, (-1, 2)).contiguous())
    turn_T1P = torch.complex(cos_TP.to(dtype), sin_TP.to(dtype)).unsqueeze(1)
    return torch.view_as_real(pair_THP * turn_T1P).flatten(-2).to(x_THR.dtype)


def rope_halves(x_THR: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """Rotate the pairs (0,P), (1,P+1), ..."""
    low, high = x_THR.chunk(2, dim=-1)
    cos_T1P, sin_T1P = cos_TP.unsqueeze(1), sin_TP.unsqueeze(1)
    turned = (low * cos_T1P - high * sin_T1P, low * sin_T1P + high * cos_T1P)
    return torch.cat(turned, dim=-1).to(x_THR.dtype)
