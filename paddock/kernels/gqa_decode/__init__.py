"""Grouped-query attention for serving: paged decode and chunked prefill.

    out[t, h] = sum_s softmax_s(scale * query[t, h] . key[s, g]) * value[s, g],  g = head h's group

`gqa_paged_decode` is a decode step: query_BQHD of B sequences, key_SGD and value_SGV the whole KV
cache, `pages` the block table, visible_BQ how many keys of its sequence each query sees (at least
one) -> out_BQHV in the query's dtype. With `window` = w a query sees only the last w of them. Pages
must hold finite values even beyond a sequence's keys; these are not attended to.

`gqa_chunked_prefill` is dense_attention (see there for spans and window) for a step with prefill
chunks: query_THD, key_SGD, value_SGV and spans, some with cached keys -> out_THV, the queries in
the order of the spans. With `slot_S` keys and values are the whole KV cache, and key s of the spans
is its slot slot_S[s].

On a GPU halves without gradients use the Triton kernels: a program holds a few queries and all
heads that share a key head, so every key is read once for them, and long sequences are split. The
paged form never syncs with the host, so that a CUDA graph can capture it. Spans take one launch, by
a table of `tiles`; long whole documents among them use dense_attention, which is faster for them,
and so does a step without cached keys. On a CPU both forms read the cache in place, where its
kernels are loaded.
"""

from collections.abc import Sequence

from torch import Tensor

from paddock.kernels.block_table import BlockTable
from paddock.kernels.cpu import attention as cpu
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
    if cpu.suits(*heads):
        out_THV = cpu.attend(
            query_BQHD.flatten(0, 1),
            key_SGD,
            value_SGV,
            cpu.CpuSequences.of_batch(pages, visible_BQ),
            scale=scale,
            window=window,
        )
        return out_THV.unflatten(0, query_BQHD.shape[:2])
    implementation = fused if fused.suits(*heads) else reference
    return implementation.gqa_paged_decode(*heads, pages, visible_BQ, scale=scale, window=window)


def gqa_chunked_prefill(  # noqa: PLR0913  keys and values apart
    query_THD: Tensor,
    key_SGD: Tensor,
    value_SGV: Tensor,
    spans: Sequence[Span],
    *,
    scale: float,
    window: int | None = None,
    slot_S: Tensor | None = None,
) -> Tensor:
    heads = (query_THD, key_SGD, value_SGV)
    if cpu.suits(*heads):
        return cpu.attend_spans(*heads, spans, scale=scale, window=window, slot_S=slot_S)
    if slot_S is not None:
        heads = (query_THD, key_SGD.index_select(0, slot_S), value_SGV.index_select(0, slot_S))
    if fused.suits(*heads) and fused.continues(spans, window):
        return fused.gqa_chunked_prefill(*heads, spans, scale=scale, window=window)
    return dense_attention(*heads, spans, scale=scale, window=window)


__all__ = ["gqa_chunked_prefill", "gqa_paged_decode"]
