"""Arguments of the sparse MLA kernels.

T queries, H heads, C row width, V value columns of it, S rows, K slots per query.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# A sum of fixed-point numbers may use this many bits of an int64.
SUM_BITS = 62
# 2^124 is still a float32, and so is its inverse.
LARGEST_EXPONENT = 124


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Queries, latent KV rows and selected indices; see the package's contract."""

    query_THC: Tensor
    row_SC: Tensor
    index_TK: Tensor
    scale: float
    value: int

    @property
    def rest(self) -> int:
        """Columns of a row that are compared with the query but are not values (the rope part)."""
        return self.row_SC.shape[1] - self.value


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """Results of the forward pass, saved for backward."""

    out_THV: Tensor
    lse_TH: Tensor  # natural logarithm, float32; +inf for a query without keys, whose output is 0


def row_sums(problem: Problem, grad_THV: Tensor, *, fixed: bool) -> tuple[Tensor, Tensor]:
    """Zeros to add row gradients into, and the unit [1] in which to add them.

    Programs add in the order in which they finish. Float32 sums then differ in their last bits
    from run to run. Integer sums do not: with `fixed`, contributions are counted in units so small
    that rounding them is no worse than float32's own rounding, and so large that no sum of one
    contribution per query can overflow.
    """
    row_SC = problem.row_SC
    if not fixed:
        zeros_SC = torch.zeros(row_SC.shape, dtype=torch.float32, device=row_SC.device)
        return zeros_SC, torch.ones(1, dtype=torch.float32, device=row_SC.device)
    exponent = SUM_BITS - largest_sum(problem, grad_THV).log2().ceil()
    unit = torch.exp2(exponent.clamp(max=LARGEST_EXPONENT)).float().view(1)
    return torch.zeros(row_SC.shape, dtype=torch.int64, device=row_SC.device), unit


def largest_sum(problem: Problem, grad_THV: Tensor) -> Tensor:
    """A bound on any entry of the row gradients, partial sums included, as a float64 scalar.

    One query adds sum_h p g + ds q to a row, where |p| <= 1 and, since an output is an average of
    value rows, |ds| <= scale * |g . value - g . out| <= 2 scale |g| |row|.
    """
    query_THC = problem.query_THC
    T, H = query_THC.shape[:2]
    grad = torch.linalg.vector_norm(grad_THV, dim=-1, dtype=torch.float32).amax().double()
    row = torch.linalg.vector_norm(problem.row_SC, dim=-1, dtype=torch.float32).amax().double()
    query = torch.linalg.vector_norm(query_THC, ord=torch.inf, dtype=torch.float32).double()
    # Probabilities are rounded to the query's dtype: one percent is more than enough.
    return 1.01 * T * H * grad * (1 + 2 * abs(problem.scale) * row * query)


def from_sums(sum_SC: Tensor, unit: Tensor, dtype: torch.dtype) -> Tensor:
    """Row gradients from their sums."""
    return sum_SC.to(dtype) if sum_SC.is_floating_point() else (sum_SC.double() / unit).to(dtype)
