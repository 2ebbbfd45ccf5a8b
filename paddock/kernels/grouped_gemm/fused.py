"""Grouped GEMM on a GPU: PyTorch's kernel, which needs no counts on the host."""

import torch
from torch import Tensor
from torch.nn import functional as F

from paddock.kernels.dispatch import is_enabled


def suits(x_RD: Tensor, weight_EFD: Tensor) -> bool:
    """bfloat16 on CUDA, rows of a multiple of 16 bytes."""
    return (
        is_enabled("grouped_gemm")
        and x_RD.is_cuda
        and x_RD.dtype == weight_EFD.dtype == torch.bfloat16
        and weight_EFD.shape[1] % 8 == 0
        and weight_EFD.shape[2] % 8 == 0
    )


def grouped_gemm(x_RD: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> Tensor:
    ends_E = counts_E.cumsum(0).int()
    return F.grouped_mm(x_RD, weight_EFD.mT, offs=ends_E)
