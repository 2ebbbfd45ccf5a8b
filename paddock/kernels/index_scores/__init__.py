"""Lightning-indexer scores.

    score[t, s] = sum_h weight[t, h] * relu(query[t, h] . key[s])

query_THD, key_SD, weight_TH -> score_TS in float32 (float64 for float64 inputs). Weights may be
negative, so scores may be; many are exactly zero, which is why top-k needs a tie rule. The caller
folds the scales (heads^-0.5, dim^-0.5) into the weights: relu is positively homogeneous.

The [T, H, S] products exist for one chunk of queries at a time; for long sequences ask
`topk.index_topk`, which never holds score_TS whole either.
"""

from .reference import index_scores

__all__ = ["index_scores"]
