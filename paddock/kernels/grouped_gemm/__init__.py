"""Grouped GEMM: one matrix product per expert over rows sorted by expert.

    out[r] = weight[expert of row r] @ x[r]

x_RD sorted by expert, weight_EFD, counts_E how many rows each expert has (a tensor, or Python ints,
summing to R) -> out_RF in x's dtype.

In the reference a row's result is bitwise independent of how many other rows its expert
received: it multiplies fixed blocks of rows, because BLAS picks another summation order for another
row count. So a token's logits cannot change with tokens that come after it. On a GPU bfloat16 goes
to PyTorch's grouped GEMM, which agrees to bfloat16's rounding.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import fused, reference


def grouped_gemm(x_RD: Tensor, weight_EFD: Tensor, counts_E: Sequence[int] | Tensor) -> Tensor:
    if fused.suits(x_RD, weight_EFD):
        return fused.grouped_gemm(x_RD, weight_EFD, torch.as_tensor(counts_E, device=x_RD.device))
    return reference.grouped_gemm(x_RD, weight_EFD, counts_E)


__all__ = ["grouped_gemm"]
