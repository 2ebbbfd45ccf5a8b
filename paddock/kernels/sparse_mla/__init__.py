"""Sparse MLA: latent attention over the selected top-k tokens of each query.

    out[t, h] = sum_k softmax_k(scale * query[t, h] . row[index[t, k]]) * row[index[t, k], :value]

query_THC absorbed queries (latent part, then rope part), row_SC shared by all heads, index_TK
int32 with -1 for "no key" and no row twice, value the number of leading columns of a row that are
also its value -> out_THV in query's dtype. scale is (nope + rope)^-0.5 of the *expanded* head,
never C^-0.5. Softmax and sums in float32 or better. A query without keys gets zeros, and its
gradients are zero.

`reference` is the definition: forward and backward gather [Q, K, C] for a chunk of queries at a
time; nothing of size T * K is kept for the backward but the indices.

On a GPU bfloat16 uses a kernel (`fused` says which). `gluon`: Hopper's matrix units, rows gathered
by dedicated warps, 64 heads at a time; with 32 heads or fewer, neighbouring queries share a program
and one merged list of keys. `triton`: every other GPU, width and head count. Both
keep out and its log-sum-exp for the backward, and multiply probabilities as bfloat16: gradients are
good to about 2e-3 of their norm.

Output and query gradients are bitwise identical between two runs. Row gradients are sums over
all queries, in the order in which programs finish, and differ in the last bits of float32; with
`deterministic` (by default, what torch.use_deterministic_algorithms says) they are summed as
64-bit integers and agree too. On the CPU everything always agrees.
"""

import torch
from torch import Tensor

from paddock.kernels.cpu import attention as cpu

from . import fused, reference
from .problem import Problem


def sparse_mla(
    query_THC: Tensor,
    row_SC: Tensor,
    index_TK: Tensor,
    *,
    scale: float,
    value: int,
    deterministic: bool | None = None,
) -> Tensor:
    problem = Problem(query_THC, row_SC, index_TK, scale, value)
    if cpu.suits(query_THC, row_SC, row_SC[..., :value]):
        row_S1C, sequences = row_SC.unsqueeze(1), cpu.CpuSequences.of_selection(index_TK)
        return cpu.attend(query_THC, row_S1C, row_S1C[..., :value], sequences, scale=scale)
    if not fused.suits(problem):
        return reference.sparse_mla(query_THC, row_SC, index_TK, scale=scale, value=value)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    return fused.sparse_mla(problem, deterministic=deterministic)


__all__ = ["sparse_mla"]
