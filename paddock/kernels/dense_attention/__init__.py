"""Causal attention over expanded heads: full, sliding-window, or over selected top-k keys.

    out[t, h] = sum_s softmax_s(scale * query[t, h] . key[s, g]) * value[s, g],  g = head h's group

query_THD, key_SGD, value_SGV with G dividing H, spans saying which keys each query sees
-> out_THV, the queries in the order of the spans. With `window` = w a query at position p sees
only positions p - w + 1 .. p.

    topk_masked_attention(..., spans, index_TK)   the same over selected keys: a row of index_TK
    names them as the spans number keys (see topk), a row of -1 means every key before the query

Spans of topk_masked_attention have no cached keys. It masks a dense product instead of gathering,
whose backward is faster while a document is only a few times longer than top-k.

`reference` is the definition, on top of PyTorch's fused attention: documents of equal size are
batched; where queries follow cached keys, the mask exists for one chunk of queries at a time.
On a GPU whole documents in half precision use the `packed` kernel: one launch for all of them, the
selected keys as a bit mask (T * longest / 8 bytes), no atomics, so that two runs are bitwise
identical. Without a mask it is used only for documents of many lengths: for few lengths PyTorch's
attention is faster.
"""

from collections.abc import Sequence

from torch import Tensor

from paddock.kernels.cpu import attention as cpu
from paddock.kernels.cpu import training
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
    if spans and cpu.suits(*heads):
        return cpu.attend_spans(*heads, spans, scale=scale, window=window)
    if window is None and training.suits_attention(*heads, spans):
        return training.attention(*heads, spans, scale=scale)
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
    if cpu.suits(*heads):
        return cpu.attend_spans(*heads, spans, scale=scale, index_TK=index_TK)
    if packed.suits("topk_masked_attention", *heads, spans):
        return packed.attention(*heads, spans, index_TK, scale=scale)
    return reference.topk_masked_attention(*heads, spans, index_TK, scale=scale)


__all__ = ["dense_attention", "topk_masked_attention"]
