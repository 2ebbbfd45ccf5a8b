"""Newton-Schulz orthogonalization of a stack of matrices (quintic), for Muon.

    x <- u / max(norm(u), eps)                             Frobenius norm, so singular values <= 1
    x <- a x + (b x x^T + c (x x^T)^2) x                   once a step, with that step's (a, b, c)

update_XMN, any floating dtype -> same shape and dtype, singular vectors kept, singular values
pushed towards one. Each trailing matrix is independent; tall ones are transposed internally.

Step i uses triple i; the last triple is used for all further steps. `dtype` is what the
products run in: None keeps that of `update`; bfloat16 is Moonlight's choice and costs about two
digits (float16 lacks the range for raw gradients). With bfloat16, one matrix and JORDAN this is
torch.optim.Muon's arithmetic, operation by operation.

`reference` is the definition. On a GPU bfloat16 uses `fused` where that is faster: it needs
fewer products, and its result is closer to the exact one.
"""

import torch
from torch import Tensor

from . import fused, reference
from .reference import JORDAN, XTUNER, Coefficients


def newton_schulz(
    update_XMN: Tensor,
    *,
    coefficients: Coefficients = JORDAN,
    steps: int = 5,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
) -> Tensor:
    if fused.suits(update_XMN, dtype, steps):
        return fused.newton_schulz(update_XMN, coefficients=coefficients, steps=steps, eps=eps)
    return reference.newton_schulz(
        update_XMN, coefficients=coefficients, steps=steps, eps=eps, dtype=dtype
    )


__all__ = ["JORDAN", "XTUNER", "Coefficients", "newton_schulz"]
