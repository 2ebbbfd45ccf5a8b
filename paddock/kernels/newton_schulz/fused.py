"""GPU implementation of Newton-Schulz: on the Gram matrix and in float16.

A step multiplies x by a polynomial of its Gram matrix g, and so the next Gram matrix is a
polynomial of this one:

    q = a + b g + c g^2        x <- q x        g <- q g q

So several steps need x twice: once for g, once for the product of their q. All that is multiplied
in between is M x M, symmetric, and commutes, so that half of each such product suffices. Five
steps cost 4 N / M + 14 products of M x M matrices, or 3 N / M + 7 by halves, against 10 N / M + 5
of the definition: 26 or 16 and 35 where N is 3 M, 18 or 10 and 15 where the matrix is square.

Halves are computed by a kernel of our own, whole products by the library. `HALF_FROM` says which,
`pays` whether either is faster than the reference; both are measured.

Small singular values are squared in g, and roundings there can make an eigenvalue negative, which
grows without bound. Two measures keep the result closer to the exact one than the definition's
bfloat16 is (tests/kernels/test_newton_schulz_fused.py): g is recomputed after the second step
and after every third one from there, and products are rounded to float16, which is eight times
finer. Its range suffices because singular values never exceed about one; the small entries that a
matrix of norm one begins with are lifted by SCALE, which the first polynomial undoes.

B matrices, M the shorter side, N the longer one, R x C as stored in memory.
"""

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from paddock.kernels.dispatch import has_triton, is_enabled
from paddock.kernels.precision import opmath_dtype

from .reference import Coefficients

Triple = tuple[float, float, float]

# A power of two: exact. Its fourth power bounds the first g^2, of which the library may round
# partial sums to float16 (below 65,504) before it multiplies them by c.
SCALE = 8.0
PHASES = (2, 3)  # steps until g is recomputed; the last number repeats

# Rows from which half a product by our kernel takes less time than a whole one by the library.
# H200, ours / torch.bmm in ms: 1 x 6144 x 16384 1.32 / 1.68, 1 x 6144 x 6144 0.62 / 0.67,
# 16 x 2048 x 2048 0.50 / 0.40, 64 x 256 x 256 0.060 / 0.027.
HALF_FROM = 4096
TILE = 128  # rows and columns that a program computes; 256 columns took 1.15 times as long
DEPTH = 64  # summed at a time


def suits(update_XMN: Tensor, dtype: torch.dtype | None, steps: int) -> bool:
    """Whether this form applies: bfloat16 is requested and it is faster than the reference."""
    return (
        update_XMN.is_cuda
        and is_enabled("newton_schulz")
        and dtype == torch.bfloat16
        and steps > 0
        and update_XMN.get_device() == torch.cuda.current_device()
        and has_triton()
        and pays(update_XMN.shape[:-2].numel(), *sorted(update_XMN.shape[-2:]))
        and not (torch.is_grad_enabled() and update_XMN.requires_grad)
    )


def pays(B: int, M: int, N: int) -> bool:
    """Whether fewer products take less time than the definition's.

    They do where products are large (H200, against the definition: 1 x 6144 x 16384 1.39x,
    16 x 2048 x 6144 1.42x, 1 x 2048 x 6144 1.24x) or x is very long (64 x 256 x 6144 2.13x).
    Elsewhere launches outweigh the work (1 x 576 x 6144 0.74x) or little is saved (64 x 256 x 2048
    0.81x, 64 x 256 x 512 0.67x). Whole products are fewer only from N = 1.5 M on.
    """
    large = M >= 2048 and (M >= HALF_FROM or N >= 2 * M)
    return B > 0 and (large or (M >= 128 and N >= 16 * M))


def triangle(M: int) -> int:
    """Tiles that touch the lower triangle of an M x M matrix."""
    tiles = -(-M // TILE)
    return tiles * (tiles + 1) // 2


def newton_schulz(
    update_XMN: Tensor,
    *,
    coefficients: Coefficients,
    steps: int,
    eps: float,
    dtype: torch.dtype = torch.float16,
) -> Tensor:
    """As the definition; `dtype` is what products are rounded to."""
    x_BRC = normalized(update_XMN.reshape(-1, *update_XMN.shape[-2:]), eps, dtype)
    for triples, last in phases(coefficients, steps):
        factor_BMM = factor(x_BRC, triples)
        x_BRC = applied(factor_BMM, x_BRC, update_XMN.dtype if last else dtype)
    return x_BRC.view(update_XMN.shape)


def normalized(update_BRC: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Of norm SCALE each, contiguous."""
    norm_B11 = torch.linalg.vector_norm(
        update_BRC, dim=(-2, -1), keepdim=True, dtype=opmath_dtype(update_BRC.dtype)
    )
    x_BRC = torch.empty(update_BRC.shape, dtype=dtype, device=update_BRC.device)
    return torch.mul(update_BRC, SCALE / norm_B11.clamp(min=eps), out=x_BRC)


def phases(coefficients: Coefficients, steps: int) -> Iterator[tuple[list[Triple], bool]]:
    """The triples of the steps between two computations of g, and whether they are the last."""
    triples = (coefficients[min(step, len(coefficients) - 1)] for step in range(steps))
    number = 0
    while steps > 0:
        phase = list(islice(triples, PHASES[min(number, len(PHASES) - 1)]))
        if number == 0:
            a, b, c = phase[0]
            phase[0] = (a / SCALE, b / SCALE**3, c / SCALE**5)
        steps -= len(phase)
        number += 1
        yield phase, steps == 0


def factor(x_BRC: Tensor, triples: list[Triple]) -> Tensor:
    """The factor that these steps multiply x by, a symmetric [B, M, M]."""
    wide_BMN = x_BRC if x_BRC.size(1) <= x_BRC.size(2) else x_BRC.mT
    gram_BMM = product(wide_BMN, wide_BMN)
    factor_BMM: Tensor | None = None
    for step, triple in enumerate(triples):
        poly_BMM = product(gram_BMM, gram_BMM, triple)
        factor_BMM = poly_BMM if factor_BMM is None else product(poly_BMM, factor_BMM)
        if step + 1 < len(triples):
            gram_BMM = product(product(poly_BMM, gram_BMM), poly_BMM)
    assert factor_BMM is not None
    return factor_BMM


def product(left_BMK: Tensor, right_BMK: Tensor, triple: Triple | None = None) -> Tensor:
    """left right^T, which must be symmetric; or a I + b right + c left right^T."""
    multiply = mirrored if left_BMK.size(1) >= HALF_FROM else whole
    return multiply(left_BMK, right_BMK, triple)


def whole(left_BMK: Tensor, right_BMK: Tensor, triple: Triple | None) -> Tensor:
    """The product by the library."""
    if triple is None:
        return torch.bmm(left_BMK, right_BMK.mT)
    a, b, c = triple
    out_BMM = torch.baddbmm(right_BMK, left_BMK, right_BMK.mT, beta=b, alpha=c)
    out_BMM.diagonal(dim1=-2, dim2=-1).add_(a)
    return out_BMM


def mirrored(left_BMK: Tensor, right_BMK: Tensor, triple: Triple | None) -> Tensor:
    """The product from its lower triangle."""
    from . import triton as kernels

    assert left_BMK.stride() == right_BMK.stride()
    B, M, K = left_BMK.shape
    out_BMM = left_BMK.new_empty(B, M, M)
    a, b, c = triple or (0.0, 0.0, 1.0)
    kernels.symmetric_kernel[(triangle(M), B)](
        left_BMK, right_BMK, out_BMM, a, b, c, M, K, *left_BMK.stride(),
        POLYNOMIAL=triple is not None, EVEN=M % TILE == 0 and K % DEPTH == 0,
        BM=TILE, BK=DEPTH, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out_BMM


def applied(factor_BMM: Tensor, x_BRC: Tensor, dtype: torch.dtype) -> Tensor:
    """factor x, or x factor where x is tall; rounded to `dtype` once, where the library can."""
    tall = x_BRC.size(1) > x_BRC.size(2)
    left, right = (x_BRC, factor_BMM) if tall else (factor_BMM, x_BRC)
    if left.is_cuda and dtype == torch.float32 != left.dtype:
        return torch.bmm(left, right, out_dtype=dtype)
    return torch.bmm(left, right).to(dtype)
