"""Which precision sums and exponentials are computed in."""

import torch
from torch import Tensor


def opmath_dtype(dtype: torch.dtype) -> torch.dtype:
    """At least float32: half types widen, float64 stays.

    >>> opmath_dtype(torch.bfloat16), opmath_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


def mm_fp32(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """a @ b with a result and sums in float32 or better.

    Products of halves are exact in float32, so a tensor core that multiplies halves and adds in
    float32 computes the same thing as widening them first; where there is one, it is used.
    """
    if a_MK.is_cuda and a_MK.dtype == b_KN.dtype and a_MK.dtype.itemsize == 2:
        return torch.mm(a_MK, b_KN, out_dtype=torch.float32)
    dtype = opmath_dtype(torch.promote_types(a_MK.dtype, b_KN.dtype))
    return a_MK.to(dtype) @ b_KN.to(dtype)
