"""Dispatch of the MLA decode kernels.

T queries, H heads, C row width; K maximum keys of a query; in a decode batch B sequences, Q queries
each, N = B * Q.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paddock.kernels.block_table import BlockTable
from paddock.kernels.dispatch import can_use_kernel
from paddock.kernels.spans import Span
from paddock.kernels.sparse_mla import sparse_mla

MAX_WIDTH = 512
MAX_LISTED_KEYS = 1 << 26  # over all queries, four bytes each


def suits(query: Tensor, row_SC: Tensor, value: int) -> bool:
    """Whether the kernels apply: halves on a GPU, no gradients, at most 512 value columns."""
    return (
        can_use_kernel("mla_decode", query, row_SC)
        and query.dtype == row_SC.dtype
        and 0 < value <= MAX_WIDTH
        and row_SC.shape[1] - value <= MAX_WIDTH
        and row_SC.is_contiguous()
        and query.numel() > 0
        and not (torch.is_grad_enabled() and (query.requires_grad or row_SC.requires_grad))
    )


def lists(spans: Sequence[Span]) -> bool:
    """Whether the key lists of all queries are short enough."""
    listed = sum(span.queries for span in spans) * max((s.keys for s in spans), default=0)
    return 0 < listed <= MAX_LISTED_KEYS


def mla_decode(
    query_THC: Tensor, row_SC: Tensor, spans: Sequence[Span], *, scale: float, value: int
) -> Tensor:
    """As sparse attention with every key selected: that kernel uses tensor cores."""
    device, longest = row_SC.device, max(span.keys for span in spans)
    query = torch.cat([torch.arange(s.query, s.query + s.queries) for s in spans])
    first = torch.cat([torch.full((s.queries,), s.key) for s in spans])
    seen = torch.cat([torch.arange(s.past + 1, s.keys + 1) for s in spans])
    query_T, first_T1, seen_T1 = torch.stack((query, first, seen)).to(device).unsqueeze(-1)
    key_K = torch.arange(longest, device=device)
    index_TK = torch.where(key_K < seen_T1, first_T1 + key_K, -1).int()
    return sparse_mla(query_THC[query_T[:, 0]], row_SC, index_TK, scale=scale, value=value)


def mla_paged_decode(
    query_BQHC: Tensor,
    row_SC: Tensor,
    pages: BlockTable,
    visible_BQ: Tensor,
    *,
    scale: float,
    value: int,
) -> Tensor:
    from .triton import Asked, attend

    _, Q, H, _ = query_BQHC.shape
    problem = Asked(
        query_BQHC.flatten(1, 2), row_SC, pages, H, Q, scale, value, visible_BQ=visible_BQ
    )
    return attend(problem).unflatten(1, (Q, H))


def mla_sparse_decode(
    query_NHC: Tensor,
    row_SC: Tensor,
    pages: BlockTable,
    index_NK: Tensor,
    *,
    scale: float,
    value: int,
) -> Tensor:
    from .triton import Asked, attend

    (N, H, _), B = query_NHC.shape, len(pages.page_BP)
    return attend(Asked(query_NHC, row_SC, pages, H, N // B, scale, value, index_BK=index_NK))
