"""Reference of SwiGLU. R rows, F inner dim."""

from torch import Tensor
from torch.nn import functional as F


def swiglu(gate_RF: Tensor, up_RF: Tensor) -> Tensor:
    return F.silu(gate_RF) * up_RF
