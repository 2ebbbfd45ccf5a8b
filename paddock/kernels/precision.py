"""Accumulation dtypes: sums and exponentials run in float32 or wider."""

import torch
from torch import Tensor


def opmath_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float32 for half types, float64 stays.

    >>> opmath_dtype(torch.bfloat16), opmath_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


def mm_fp32(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """a @ b with result and sums in float32 or wider.

    Products of halves are exact in float32, so a tensor core that multiplies halves and adds in
    float32 computes the same as widening first; it is used on a GPU.
    """
    if a_MK.is_cuda and a_MK.dtype == b_KN.dtype and a_MK.dtype.itemsize == 2:
        return torch.mm(a_MK, b_KN, out_dtype=torch.float32)
    dtype = opmath_dtype(torch.promote_types(a_MK.dtype, b_KN.dtype))
    return a_MK.to(dtype) @ b_KN.to(dtype)
