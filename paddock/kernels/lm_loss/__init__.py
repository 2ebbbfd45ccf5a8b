"""Output projection and cross-entropy in one, without the logits of all tokens at once.

    lm_loss[t]     = weight[t] * (logsumexp(z[t]) - z[t, target[t]]),   z[t] = head hidden[t]
    logprobs_of[t] = log softmax(z[t] / temperature)[target[t]]

hidden_TD, head_VD, target_T int64 -> [T] in float32 (float64 for float64 inputs). A token with a
negative target is ignored: its result is 0, and no logits are made for it. Nothing is averaged: the
caller owns the denominator.

Half inputs give float32 logits: a logit of 20 rounded to bfloat16 is off by up to 0.06, which
policy ratios cannot bear. Logits live in chunks of rows of at most `chunk_bytes`, one chunk at a
time; backward makes them again, since a per-token loss may meet any gradient from above.
Differentiable once, in hidden and head.

`reference` is the definition.
"""

from .reference import CHUNK_BYTES, lm_loss, logprobs_of

__all__ = ["CHUNK_BYTES", "lm_loss", "logprobs_of"]
