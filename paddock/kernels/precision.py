"""Which precision sums and exponentials are computed in."""

import torch


def wide(dtype: torch.dtype) -> torch.dtype:
    """At least float32: half types widen, float64 stays.

    >>> wide(torch.bfloat16), wide(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)
