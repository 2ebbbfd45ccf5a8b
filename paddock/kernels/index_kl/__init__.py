"""How far the indexer's opinion is from where attention really looks.

    target[t, s] = mean_h softmax_s(scale * query[t, h] . row[s])
    loss         = sum_t KL(target[t, :] || softmax_s(score[t, :]))

    index_kl(index, attention, spans)      over all keys a query sees   (the dense warm-up)
    index_kl_kept(index, attention, kept)  over the kept keys alone     (the sparse phase)

`index` is the indexer's side (query_THD, key_SD, weight_TH; see index_scores), `attention` the
target's side (absorbed query_THC, row_SC, scale; see sparse_mla), `kept` the selection index_TK.
Returns the sum over queries, for the caller to divide. Gradients reach the indexer's three tensors
and nothing else: the target is a teacher. They are computed chunk by chunk in the forward pass, so
no [T, S] tensor outlives its chunk.
"""

from .reference import AttentionSide, IndexSide, index_kl, index_kl_kept

__all__ = ["AttentionSide", "IndexSide", "index_kl", "index_kl_kept"]
