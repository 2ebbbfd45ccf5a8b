"""Latent attention over a chosen few rows per query.

    out[t, h] = sum_k softmax_k(scale * query[t, h] . row[index[t, k]]) * row[index[t, k], :value]

query_THC absorbed queries (latent part, then rope part), row_SC shared by all heads, index_TK
int32 with -1 for "no key" (at least one key per query), value the number of leading columns of a
row that are also its value -> out_THV in query's dtype. scale is (nope + rope)^-0.5 of the
*expanded* head, never C^-0.5. Softmax and sums in float32 or better.

Forward and backward gather [Q, K, C] for a chunk of queries at a time; nothing of size T * K is
kept for the backward but the indices. The backward adds into row gradients in a fixed order on the
CPU, so it is deterministic there.
"""

from .reference import sparse_mla

__all__ = ["sparse_mla"]
