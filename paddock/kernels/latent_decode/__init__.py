"""Dense attention in latent space: few queries against all the rows of their sequence.

    out[t, h] = sum_s softmax_s(scale * query[t, h] . row[s]) * row[s, :value]

query_THC absorbed queries, row_SC the latent rows (latent part, then rope part) shared by all
heads, spans saying which rows each query sees -> out_THV in query's dtype. Reads each cached row
once and expands none of them, which is why decoding uses it; with as many queries as keys the
expanded form (dense_attention) costs less. Softmax and sums in float32 or better, one chunk of
queries at a time.

`latent_decode_table` is the same for many sequences at once: query_BQHC, row_SC the whole storage,
slot_BM which of its rows each sequence has, visible_BQ how many of them each query sees (at least
one) -> out_BQHV. What a sequence's table holds beyond its own rows must be finite and is not seen.
"""

from .reference import latent_decode, latent_decode_table

__all__ = ["latent_decode", "latent_decode_table"]
