"""Orthogonalization of a stack of matrices by quintic Newton-Schulz.

    x <- u / max(norm(u), eps)                             Frobenius norm, so singular values <= 1
    x <- a x + (b x x^T + c (x x^T)^2) x                   once a step, with that step's (a, b, c)

update_XMN, any floating dtype -> same shape and dtype, singular vectors kept, singular values
pushed towards one. Each trailing matrix is on its own; tall ones are transposed inside.

A step uses the triple of its number; the last triple serves all further steps. `dtype` is what the
products run in: None keeps that of `update`; bfloat16 is Moonlight's choice and costs about two
digits (float16 lacks the range for raw gradients). With bfloat16, one matrix and JORDAN this is
torch.optim.Muon's arithmetic, operation by operation.

`reference` is the definition.
"""

from .reference import JORDAN, TIGHT, Coefficients, newton_schulz

__all__ = ["JORDAN", "TIGHT", "Coefficients", "newton_schulz"]
