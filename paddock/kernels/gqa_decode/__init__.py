"""Grouped-query attention for serving: paged decode and chunked prefill.

    out[t, h] = sum_s softmax_s(scale * query[t, h] . key[s, g]) * value[s, g],  g = head h's group

`gqa_paged_decode` is a decode step: query_BQHD of B sequences, key_SGD and value_SGV the whole KV
cache, `pages` the block table, visible_BQ how many keys of its sequence each query sees (at least
one) -> out_BQHV in the query's dtype. With `window` = w a query sees only the last w of them. Pages
must hold finite values even beyond a sequence's keys; these are not attended to.

`gqa_chunked_prefill` is dense_attention (see there for spans and window) for a step with prefill
chunks: query_THD, key_SGD, value_SGV and spans, some with cached keys -> out_THV, the queries in
the order of the spans.

On a GPU halves without gradients use the Triton kernels: a program holds a few queries and all
heads that share a key head, so every key is read once for them, and long sequences are split. The
paged form never syncs with the host, so that a CUDA graph can capture it. Spans take one launch, by
a table of `tiles`; long whole documents among them use dense_attention, which is faster for them,
and so does a step without cached keys.
"""

from collections.abc import Sequence

from torch import Tensor

from paddock.kernels.block_table import BlockTable
from paddock.kernels.dense_attention import dense_attention
from paddock.kernels.gqa_decode import fused, reference
from paddock.kernels.spans import Span


def gqa_paged_decode(  # noqa: PLR0913  separate keys and values
    query_BQHD: Tensor,
    key_SGD: Tensor,
    value_SGV: Tensor,
    pages: BlockTable,
    visible_BQ: Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    heads = (query_BQHD, key_SGD, value_SGV)
    implementation = fused if fused.suits(*heads) else reference
    return implementation.gqa_paged_decode(*heads, pages, visible_BQ, scale=scale, window=window)


def gqa_chunked_prefill(
    query_THD: Tensor,
    key_SGD: Tensor,
    value_SGV: Tensor,
    spans: Sequence[Span],
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    heads = (query_THD, key_SGD, value_SGV)
    if fused.suits(*heads) and fused.continues(spans, window):
        return fused.gqa_chunked_prefill(*heads, spans, scale=scale, window=window)
    return dense_attention(*heads, spans, scale=scale, window=window)


__all__ = ["gqa_chunked_prefill", "gqa_paged_decode"]
