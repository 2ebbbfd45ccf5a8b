"""Dense attention in latent space: few queries against all the rows of their sequence.

    out[t, h] = sum_s softmax_s(scale * query[t, h] . row[s]) * row[s, :value]

query_THC absorbed queries, row_SC the latent rows (latent part, then rope part) shared by all
heads, spans saying which rows each query sees -> out_THV in query's dtype. Reads each cached row
once and expands none of them, which is why decoding uses it; with as many queries as keys the
expanded form (dense_attention) costs less. Softmax and sums in float32 or better, one chunk of
queries at a time.
"""

from .reference import latent_decode

__all__ = ["latent_decode"]
