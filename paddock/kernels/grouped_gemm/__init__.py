"""One matrix product per expert over rows sorted by expert.

    out[r] = weight[expert of row r] @ x[r]

x_RD sorted by expert, weight_EFD, counts_E how many rows each expert has (Python ints or a tensor,
summing to R) -> out_RF in x's dtype.

A row's result does not depend, bit for bit, on how many other rows its expert received: the
reference multiplies fixed blocks of rows, because BLAS picks another summation order for another
row count. So a token's logits cannot change with tokens that come after it.
"""

from .reference import grouped_gemm

__all__ = ["grouped_gemm"]
