"""Reference of the norms. T tokens, D features."""

import torch
from torch import Tensor
from torch.nn import functional as F

from paddock.kernels.precision import opmath_dtype


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    dtype = opmath_dtype(x_TD.dtype)
    if not torch.is_grad_enabled():  # one call instead of five: calls dominate a decode step
        if dtype == x_TD.dtype == weight_D.dtype:
            return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)
        return weight_D * F.rms_norm(x_TD.to(dtype), weight_D.shape, eps=eps).to(x_TD.dtype)
    wide_TD = x_TD.to(dtype)
    scale_T1 = torch.rsqrt(wide_TD.square().mean(-1, keepdim=True) + eps)
    return weight_D * (wide_TD * scale_T1).to(x_TD.dtype)


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    dtype = opmath_dtype(x_TD.dtype)
    normed_TD = F.layer_norm(
        x_TD.to(dtype), weight_D.shape, weight_D.to(dtype), bias_D.to(dtype), eps
    )
    return normed_TD.to(x_TD.dtype)
