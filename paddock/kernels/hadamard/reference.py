"""Reference of the Hadamard transform.

X any leading dims, N = P * S: P the Paley factor (1, 12 or 20), S the power of two.
"""

import torch
from torch import Tensor

from paddock.kernels.precision import opmath_dtype


def hadamard(x_XN: Tensor) -> Tensor:
    return _transform(x_XN, inverse=False)


def hadamard_inverse(x_XN: Tensor) -> Tensor:
    return _transform(x_XN, inverse=True)


def hadamard_matrix(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """H itself, [n, n], to inspect it or fold it into a weight."""
    P, S = _factors(n)
    matrix = _paley(P)
    for _ in range(S.bit_length() - 1):
        matrix = torch.kron(matrix, torch.tensor([[1, 1], [1, -1]]))
    return matrix.to(dtype) * n**-0.5


def _transform(x_XN: Tensor, *, inverse: bool) -> Tensor:
    N = x_XN.size(-1)
    P, S = _factors(N)
    x_XPS = _butterfly(x_XN.to(opmath_dtype(x_XN.dtype)).unflatten(-1, (P, S)))
    if P > 1:
        paley_PP = _paley(P).to(x_XPS)
        x_XPS = (paley_PP.T if inverse else paley_PP) @ x_XPS
    return (x_XPS * N**-0.5).flatten(-2).to(x_XN.dtype)


def _butterfly(x_XS: Tensor) -> Tensor:
    """Sylvester's matrix times x in log2(S) passes of sums and differences, unscaled."""
    S, half = x_XS.size(-1), 1
    while half < S:
        left, right = x_XS.unflatten(-1, (-1, 2, half)).unbind(-2)
        x_XS = torch.stack((left + right, left - right), dim=-2).flatten(-3)
        half *= 2
    return x_XS


def _factors(n: int) -> tuple[int, int]:
    """n as (Paley factor, power of two)."""
    for paley in (1, 12, 20):
        power, rest = divmod(n, paley)
        if rest == 0 and power > 0 and power & (power - 1) == 0:
            return paley, power
    raise ValueError(f"no Hadamard transform of size {n}: it must be 2^k, 12 * 2^k or 20 * 2^k")


def _paley(size: int) -> Tensor:
    """Paley's first construction: I + C, where C is skew and C C^T = q I for a prime q = size - 1.

    C holds the quadratic character of i - j, bordered by ones; q must be 3 modulo 4.
    """
    if size == 1:
        return torch.ones(1, 1, dtype=torch.int64)
    q = size - 1
    character = torch.full((q,), -1)
    character[torch.arange(q) ** 2 % q] = 1
    character[0] = 0
    index = torch.arange(q)
    matrix = torch.eye(size, dtype=torch.int64)
    matrix[0, 1:] = 1
    matrix[1:, 0] = -1
    matrix[1:, 1:] += character[(index[:, None] - index) % q]
    return matrix
