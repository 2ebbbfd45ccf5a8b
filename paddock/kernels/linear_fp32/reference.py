"""Reference of the float32 linear layer. T tokens, D inputs, E outputs."""

from torch import Tensor
from torch.nn import functional as F

from paddock.kernels.precision import opmath_dtype


def linear_fp32(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    dtype = opmath_dtype(x_TD.dtype)
    return F.linear(x_TD.to(dtype), weight_ED.to(dtype))
