"""Grouped-query attention of few queries to the many keys behind them.

    out[t, h] = sum_s softmax_s(scale * query[t, h] . key[s, g]) * value[s, g],  g = head h's group

`grouped_decode_table` is a step of decoding: query_BQHD of B sequences, key_SGD and value_SGV the
whole storage, pages saying which of its rows each sequence has, visible_BQ how many of them each
query sees (at least one) -> out_BQHV in the query's dtype. With `window` = w a query that sees n
keys sees only the last w of them. What a sequence's pages hold beyond its own rows must be finite
and is not seen.

`grouped_continued` is dense_attention (see there for spans and window) for a step that reads
prompts: query_THD, key_SGD, value_SGV and spans, some with a past -> out_THV, the queries in the
order of the spans.

On a GPU halves that nobody wants gradients of go to `triton`: a program holds a few queries and all
heads that share a key head, so every key is read once for them, and long sequences are cut into
parts. The table form asks nothing of the host, so that a graph may hold it. Spans take one launch,
by a table of `tiles`; long whole documents among them stay with dense_attention, whose products are
faster, and so does a step without any past.
"""

from collections.abc import Sequence

from torch import Tensor

from paddock.kernels.block_table import BlockTable
from paddock.kernels.dense_attention import dense_attention
from paddock.kernels.gqa_decode import fused, reference
from paddock.kernels.spans import Span


def gqa_paged_decode(  # noqa: PLR0913  keys and values apart
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
    twin = fused if fused.suits(*heads) else reference
    return twin.gqa_paged_decode(*heads, pages, visible_BQ, scale=scale, window=window)


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
