"""Gated delta rule: linear attention with decay and a delta update. Per head,

    S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
    o_t = S_t^T q_t

query_THK, key_THK, value_THV, log_alpha_TH (finite, <= 0), beta_TH, initial_state_HKV (None: zeros)
-> out_THV in value's dtype, final_state_HKV to go on from, in float32 (float64 for float64 inputs).
Sums run in the state's dtype.

The tokens are one document: a document boundary is a new call. Scaling of queries and normalization
of keys are the caller's; keys longer than sqrt(2 / beta) make the state grow without bound.

`recurrent_gated_delta_rule` is the definition, token by token. `chunk_gated_delta_rule`, the
default, is the same function in T / chunk sequential steps of matrix products.
"""

from .reference import chunk_gated_delta_rule, recurrent_gated_delta_rule

gated_delta_rule = chunk_gated_delta_rule

__all__ = ["chunk_gated_delta_rule", "gated_delta_rule", "recurrent_gated_delta_rule"]
