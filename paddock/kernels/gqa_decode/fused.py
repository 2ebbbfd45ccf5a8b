"""Dispatch of the grouped-query attention kernels.

T queries, H heads, G key heads, D query/key dim, V value dim; in a decode batch B sequences,
Q queries each, N = B * Q.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paddock.kernels.block_table import BlockTable
from paddock.kernels.dense_attention import dense_attention
from paddock.kernels.dispatch import can_use_kernel
from paddock.kernels.spans import Span

from .tiles import plan

MAX_HEAD_DIM = 256
MAX_GROUP_SIZE = 16  # heads per key head: the smallest tile holds one query of them


def suits(query: Tensor, key_SGD: Tensor, value_SGV: Tensor) -> bool:
    """Whether the kernels apply: halves on a GPU, no gradients, head dim at most 256."""
    heads = (query, key_SGD, value_SGV)
    return (
        can_use_kernel("gqa_decode", *heads)
        and query.dtype == key_SGD.dtype == value_SGV.dtype
        and max(query.shape[-1], value_SGV.shape[-1]) <= MAX_HEAD_DIM
        and query.shape[-2] <= MAX_GROUP_SIZE * key_SGD.shape[1]
        and key_SGD.stride(-1) == value_SGV.stride(-1) == 1
        and query.numel() > 0
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in heads))
    )


def continues(spans: Sequence[Span], window: int | None) -> bool:
    """Whether any span has cached keys or is longer than the window."""
    return any(s.keys > s.queries or (window is not None and s.keys > window) for s in spans)


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
    from .triton import Heads, decode

    heads = Heads(query_BQHD.flatten(0, 1), key_SGD, value_SGV, scale, window)
    return decode(heads, pages, visible_BQ).unflatten(0, query_BQHD.shape[:2])


def gqa_chunked_prefill(
    query_THD: Tensor,
    key_SGD: Tensor,
    value_SGV: Tensor,
    spans: Sequence[Span],
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    from .triton import Heads, read

    (_, H, _), G, V = query_THD.shape, key_SGD.shape[1], value_SGV.shape[-1]
    schedule = plan(tuple(spans), H // G, G, window, query_THD.device)
    out_THV = query_THD.new_empty(sum(span.queries for span in spans), H, V)
    if schedule.table is not None:
        read(Heads(query_THD, key_SGD, value_SGV, scale, window), schedule, out_THV)
    if schedule.whole:
        documents = [span for _, span in schedule.whole]
        whole_NHV = dense_attention(
            query_THD, key_SGD, value_SGV, documents, scale=scale, window=window
        )
        pieces = whole_NHV.split([span.queries for span in documents])
        for (out, span), piece in zip(schedule.whole, pieces, strict=True):
            out_THV[out : out + span.queries] = piece
    return out_THV
