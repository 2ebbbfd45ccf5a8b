"""KL loss of the indexer: index score distribution against the attention distribution.

    target[t, s] = mean_h softmax_s(scale * query[t, h] . row[s])
    loss         = sum_t KL(target[t, :] || softmax_s(score[t, :]))

    index_kl(index, attention, spans)      over all keys a query sees   (the dense warm-up)
    index_kl_topk(index, attention, index_TK)  over the selected keys   (the sparse phase)

`index` is the indexer's side (query_THD, key_SD, weight_TH; see index_scores), `attention` the
target's side (absorbed query_THC, row_SC, scale; see sparse_mla), index_TK the selected keys.
Returns the sum over queries, for the caller to divide. Gradients reach the indexer's three tensors
and nothing else: the target is detached. They are computed chunk by chunk in the forward pass, so
no [T, S] tensor outlives its chunk.

`reference` is the definition. On a GPU halves use the `fused` kernels, which hold no [Q, H, S]
tensor either: probabilities of one tile of keys live in registers. Gradients of scores are rounded
to bfloat16 before they are multiplied: those of the indexer are good to about 2e-3 of their norm.
"""

from collections.abc import Sequence

from torch import Tensor

from paddock.kernels.spans import Span

from . import fused, reference
from .reference import IndexerInputs, IndexerTarget


def index_kl(index: IndexerInputs, attention: IndexerTarget, spans: Sequence[Span]) -> Tensor:
    if fused.suits(index, attention):
        return fused.index_kl(index, attention, spans)
    return reference.index_kl(index, attention, spans)


def index_kl_topk(index: IndexerInputs, attention: IndexerTarget, index_TK: Tensor) -> Tensor:
    if fused.suits(index, attention) and index_TK.numel() > 0:
        return fused.index_kl_topk(index, attention, index_TK)
    return reference.index_kl_topk(index, attention, index_TK)


__all__ = ["IndexerInputs", "IndexerTarget", "index_kl", "index_kl_topk"]
