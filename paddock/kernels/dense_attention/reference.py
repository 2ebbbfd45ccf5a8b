"""Causal attention by way of scaled_dot_product_attention.

T queries, S keys, H heads, G key heads, D query/key dim, V value dim; N queries and M keys of one
span; B spans of at most L tokens batched together.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from paddock.kernels.spans import Span
from paddock.kernels.workspace import chunks

# Documents whose lengths differ by less than this share a padded batch.
SHORTEST_OF_LONGEST = 0.75


def dense_attention(
    query_THD: Tensor,
    key_SGD: Tensor,
    value_SGV: Tensor,
    spans: Sequence[Span],
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """[T, H, V], the queries in the order of the spans; see the package's contract."""
    groups = query_THD.shape[1] // key_SGD.shape[1]
    key_SHD = key_SGD.repeat_interleave(groups, dim=1) if groups > 1 else key_SGD
    value_SHV = value_SGV.repeat_interleave(groups, dim=1) if groups > 1 else value_SGV
    V = value_SHV.shape[-1]
    # The fused kernels want one head width; zeros change neither the scores nor the kept columns.
    width = max(query_THD.shape[-1], V)
    query, key, value = (_widen(x, width) for x in (query_THD, key_SHD, value_SHV))

    pieces: list[Tensor | None] = [None] * len(spans)
    whole = [i for i, s in enumerate(spans) if s.past == 0 and (window is None or s.keys <= window)]
    for batch in _batches(spans, whole):
        for i, out_NHV in zip(batch, _whole(query, key, value, spans, batch, scale), strict=True):
            pieces[i] = out_NHV
    for i, span in enumerate(spans):
        if pieces[i] is None:
            pieces[i] = _continued(query, key, value, span, scale, window)
    out_THV = torch.cat([piece for piece in pieces if piece is not None])
    return out_THV[..., :V]


def _widen(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def _batches(spans: Sequence[Span], whole: list[int]) -> Iterator[list[int]]:
    """Indices of spans without a past, grouped so that padding wastes little."""
    batch: list[int] = []
    for i in sorted(whole, key=lambda i: -spans[i].keys):
        if batch and spans[i].keys < SHORTEST_OF_LONGEST * spans[batch[0]].keys:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _whole(
    query: Tensor, key: Tensor, value: Tensor, spans: Sequence[Span], batch: list[int], scale: float
) -> Iterator[Tensor]:
    """Documents with no past, padded at the end, where causality keeps padding out of sight."""
    picked = [spans[i] for i in batch]
    if len(picked) == 1:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in _slices(query, key, value, picked[0]))
    else:
        L = picked[0].keys
        offset_L = torch.arange(L, device=query.device)
        length_B1 = torch.tensor([[s.keys] for s in picked], device=query.device)
        inside_BL = torch.minimum(offset_L, length_B1 - 1)
        query_BL = inside_BL + torch.tensor([[s.query] for s in picked], device=query.device)
        key_BL = inside_BL + torch.tensor([[s.key] for s in picked], device=query.device)
        q, k, v = (
            x[index].transpose(1, 2)
            for x, index in ((query, query_BL), (key, key_BL), (value, key_BL))
        )
    out_BLHV = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)
    for out_LHV, span in zip(out_BLHV, picked, strict=True):
        yield out_LHV[: span.queries]


def _continued(
    query: Tensor, key: Tensor, value: Tensor, span: Span, scale: float, window: int | None
) -> Tensor:
    """Queries that continue a past, or look back through a window: an explicit mask, by chunks."""
    query_NHD, key_MHD, value_MHV = _slices(query, key, value, span)
    pieces = []
    for q in chunks(span.queries, row_bytes=4 * min(span.keys, 2 * (window or span.keys))):
        last = span.past + q.stop
        first = 0 if window is None else max(0, span.past + q.start - window + 1)
        position_Q1 = torch.arange(span.past + q.start, last, device=query.device).unsqueeze(1)
        ahead_QM = position_Q1 - torch.arange(first, last, device=query.device)
        visible_QM = ahead_QM >= 0 if window is None else (ahead_QM >= 0) & (ahead_QM < window)
        out_HQV = F.scaled_dot_product_attention(
            query_NHD[q].transpose(0, 1).unsqueeze(0),
            key_MHD[first:last].transpose(0, 1).unsqueeze(0),
            value_MHV[first:last].transpose(0, 1).unsqueeze(0),
            attn_mask=None if q.stop - q.start == 1 else visible_QM,
            scale=scale,
        ).squeeze(0)
        pieces.append(out_HQV.transpose(0, 1))
    return torch.cat(pieces)


def _slices(
    query: Tensor, key: Tensor, value: Tensor, span: Span
) -> tuple[Tensor, Tensor, Tensor]:
    return query[span.query_slice], key[span.key_slice], value[span.key_slice]
