"""Orthonormal Walsh-Hadamard transform along the last dim.

    hadamard(x) = H x,   hadamard_inverse(x) = H^T x,   H H^T = I,   all entries of H are +-n^-0.5

x_XN, any floating dtype -> same shape and dtype, for N = 2^k, 12 * 2^k or 20 * 2^k; any other size
is a ValueError. Sums run in float32 or wider. A dot product is unchanged if both sides are
transformed, hence W x = hadamard(W) hadamard(x) with the rows of W transformed.

H is the Kronecker product of Paley's matrix of size 1, 12 or 20 with Sylvester's of size 2^k.
Paley's is not symmetric, hence an inverse of its own.

`reference` is the definition.
"""

from .reference import hadamard, hadamard_inverse, hadamard_matrix

__all__ = ["hadamard", "hadamard_inverse", "hadamard_matrix"]
