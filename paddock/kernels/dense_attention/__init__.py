"""Causal attention over expanded heads, every visible key or a window of them.

    out[t, h] = sum_s softmax_s(scale * query[t, h] . key[s, g]) * value[s, g],  g = head h's group

query_THD, key_SGD, value_SGV with G dividing H, spans saying which keys each query sees
-> out_THV, the queries in the order of the spans. With `window` = w a query at position p sees
only positions p - w + 1 .. p.

    kept_attention(..., spans, index_TK)   the same over chosen keys: a row of index_TK names
    them as the spans count keys (see topk), a row of -1 means every key before the query

Spans of kept_attention have no past. It masks a dense product instead of gathering rows, whose
backward is faster while a document is only a few times longer than what is kept.

`reference` is the definition, by way of PyTorch's own fused attention: equal-sized documents are
batched; where queries continue a past, the mask exists for one chunk of queries at a time.
On a GPU whole documents in half precision go to `packed`: one launch for all of them, the kept keys
as a mask of bits (T * longest / 8 bytes), no atomics, so that two runs agree bit for bit. Without a
mask only documents of many lengths do: for few lengths PyTorch's own is faster.
"""

from collections.abc import Sequence

from torch import Tensor

from paddock.kernels.spans import Span

from . import packed, reference


def dense_attention(
    query_THD: Tensor,
    key_SGD: Tensor,
    value_SGV: Tensor,
    spans: Sequence[Span],
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    heads = (query_THD, key_SGD, value_SGV)
    ragged = len({span.keys for span in spans}) > packed.LENGTHS
    if window is None and ragged and packed.suits("causal_attention", *heads, spans):
        return packed.attention(*heads, spans, None, scale=scale)
    return reference.dense_attention(*heads, spans, scale=scale, window=window)


def topk_masked_attention(
    query_THD: Tensor,
    key_SGD: Tensor,
    value_SGV: Tensor,
    spans: Sequence[Span],
    index_TK: Tensor,
    *,
    scale: float,
) -> Tensor:
    heads = (query_THD, key_SGD, value_SGV)
    if packed.suits("topk_masked_attention", *heads, spans):
        return packed.attention(*heads, spans, index_TK, scale=scale)
    return reference.topk_masked_attention(*heads, spans, index_TK, scale=scale)


__all__ = ["dense_attention", "topk_masked_attention"]
