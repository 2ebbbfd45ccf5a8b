"""Which keys to keep, the same ones every time.

    topk(score_TS, visible_T, k)                          -> index_TK  int32
    index_topk(query_THD, key_SD, weight_TH, past, k)     -> index_TK  int32

Query t may keep keys [0, visible_T[t]). The k best by float32 score are kept; of equal scores the
lowest index wins; the answer is ascending and padded with -1 at the end where fewer than k keys are
visible. The rule fixes the answer completely, so training, serving, reference and kernel agree:
`torch.topk` alone does not (its order among ties is undefined, and -0.0 ties with 0.0).

`index_topk` scores (see index_scores) and selects chunk by chunk; query t sees past + t + 1 keys.
Nothing here is differentiable.
"""

from .reference import best, index_topk, topk

__all__ = ["best", "index_topk", "topk"]
