"""Linear layer in float32 or wider, for routers and index head weights.

    linear_fp32(x_TD, weight_ED) -> x @ weight.T

`reference` widens both and is the definition. On a GPU halves are multiplied as they are and added
in float32, which is the same product; a float32 weight is multiplied as the sum of two halves, and
loses what is below 2^-16 of it. The gradient that comes back is rounded to half, as any
activation's is.
T tokens, D inputs, E outputs.
"""

import torch
from torch import Tensor

from paddock.kernels import cpu
from paddock.kernels.linear_fp32 import fused, reference


def linear_fp32(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    if fused.suits(x_TD, weight_ED):
        return fused.linear_fp32(x_TD, weight_ED)
    if weight_ED.dtype == torch.float32 and cpu.suits(x_TD) and weight_ED.is_contiguous():
        return _cpu_linear_fp32(x_TD, weight_ED)
    return reference.linear_fp32(x_TD, weight_ED)


def _cpu_linear_fp32(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    (T, D), E = x_TD.shape, len(weight_ED)
    out_TE = x_TD.new_empty(T, E, dtype=torch.float32)
    cpu.function("linear_fp32", x_TD.dtype)(
        T, E, D, x_TD.data_ptr(), x_TD.stride(0), weight_ED.data_ptr(), out_TE.data_ptr()
    )
    return out_TE


__all__ = ["linear_fp32"]
