"""Causal attention over expanded heads, every visible key or a window of them.

    out[t, h] = sum_s softmax_s(scale * query[t, h] . key[s, g]) * value[s, g],  g = head h's group

query_THD, key_SGD, value_SGV with G dividing H, spans saying which keys each query sees
-> out_THV, the queries in the order of the spans. With `window` = w a query at position p sees
only positions p - w + 1 .. p.

    kept_attention(..., spans, index_TK)   the same over chosen keys: a row of index_TK names
    them as the spans count keys (see topk), a row of -1 means every key before the query

Spans of kept_attention have no past. It masks a dense product instead of gathering rows, whose
backward is faster while a document is only a few times longer than what is kept.

This is PyTorch's own fused attention: the baseline to beat, and the path taken wherever sparse
selection would keep everything. Equal-sized documents are batched; where queries continue a past,
the mask exists for one chunk of queries at a time.
"""

from .reference import dense_attention, kept_attention

__all__ = ["dense_attention", "kept_attention"]
