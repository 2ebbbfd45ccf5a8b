"""Rounding rows to float8 e4m3 with a scale per row. R rows (of any shape), D index head dim."""

import torch
from torch import Tensor

E4M3_MAX = 448.0


def to_float8(x_RD: Tensor) -> tuple[Tensor, Tensor]:
    """x = value * scale[..., None], up to rounding: value_RD in float8 e4m3, scale_R in float32.

    The largest entry of a row becomes the largest e4m3 number, so rotate rows with few large
    entries first (`hadamard`).
    """
    x_RD = x_RD.float()
    scale_R = x_RD.abs().amax(-1).clamp_min(1e-12) / E4M3_MAX
    return (x_RD / scale_R.unsqueeze(-1)).to(torch.float8_e4m3fn), scale_R
