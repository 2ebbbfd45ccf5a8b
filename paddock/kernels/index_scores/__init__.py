"""Index scores of the lightning indexer.

    score[t, s] = sum_h weight[t, h] * relu(query[t, h] . key[s])

query_THD, key_SD, weight_TH -> score_TS in float32 (float64 for float64 inputs). Weights may be
negative, so scores may be; many are exactly zero, which is why top-k needs a tie rule. The caller
folds the scales (heads^-0.5, dim^-0.5) into the weights: relu is positively homogeneous.

`index_scores` is differentiable and holds the [T, H, S] products of one chunk of queries at a time.
To select keys use `topk.index_topk_varlen`, which never holds score_TS whole either; its kernel
(`triton.py`) scores one bounded block of queries (`blocks.py`) at a time: products of halves or of
8-bit floats by the tensor cores, sums in float32, float32 inputs without tensor cores.

`IndexKeys` says where keys are stored and how they are scaled. 8-bit scores (float8 e4m3):
`to_float8` rounds queries and keys row by row; the keys' scales are in `IndexKeys`, the queries'
scales are multiplied into the weights by the caller. Tensor cores add 8-bit products with about 14
bits, so those scores are good to some 2e-4 of their norm, against 2e-7 for bfloat16.
"""

from .float8 import to_float8
from .reference import IndexKeys, index_scores

__all__ = ["IndexKeys", "index_scores", "to_float8"]
