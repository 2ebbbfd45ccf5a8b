"""Causal attention by way of scaled_dot_product_attention.

T queries, S keys, H heads, G key heads, D query/key dim, V value dim; N queries and M keys of one
span; B spans of at most L tokens batched together.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from paddock.kernels.spans import Span
from paddock.kernels.workspace import chunks

# Documents whose lengths differ by less than this share a padded batch.
SHORTEST_OF_LONGEST = 0.75
# Runs of queries a masked product is cut into; more would save little more of the upper triangle.
MASKED_RUNS = 4


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
    heads = _Heads.of(query_THD, key_SGD, value_SGV)
    pieces: list[Tensor | None] = [None] * len(spans)
    whole = [i for i, s in enumerate(spans) if s.past == 0 and (window is None or s.keys <= window)]
    for batch in _batches(spans, whole):
        out = _whole(heads, [spans[i] for i in batch], None, scale)
        for i, out_NHV in zip(batch, out, strict=True):
            pieces[i] = out_NHV
    for i, span in enumerate(spans):
        if pieces[i] is None:
            pieces[i] = _continued(heads, span, scale, window)
    out_THV = torch.cat([piece for piece in pieces if piece is not None])
    return out_THV[..., : value_SGV.shape[-1]]


def kept_attention(
    query_THD: Tensor,
    key_SGD: Tensor,
    value_SGV: Tensor,
    spans: Sequence[Span],
    index_TK: Tensor,
    *,
    scale: float,
) -> Tensor:
    """[T, H, V], the queries in the order of the spans; see the package's contract."""
    heads = _Heads.of(query_THD, key_SGD, value_SGV)
    pieces: list[Tensor | None] = [None] * len(spans)
    for batch in _batches(spans, list(range(len(spans)))):
        out = _whole(heads, [spans[i] for i in batch], index_TK, scale)
        for i, out_NHV in zip(batch, out, strict=True):
            pieces[i] = out_NHV
    return torch.cat([piece for piece in pieces if piece is not None])[..., : value_SGV.shape[-1]]


class _Heads(NamedTuple):
    """Queries, keys and values with as many heads and as wide heads as each other.

    The fused kernels want one head width; zeros change neither the scores nor the columns kept.
    """

    query_THD: Tensor
    key_SHD: Tensor
    value_SHD: Tensor

    @classmethod
    def of(cls, query_THD: Tensor, key_SGD: Tensor, value_SGV: Tensor) -> "_Heads":
        groups = query_THD.shape[1] // key_SGD.shape[1]
        if groups > 1:
            key_SGD = key_SGD.repeat_interleave(groups, dim=1)
            value_SGV = value_SGV.repeat_interleave(groups, dim=1)
        width = max(query_THD.shape[-1], value_SGV.shape[-1])
        return cls(*(_widen(x, width) for x in (query_THD, key_SGD, value_SGV)))


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
    heads: _Heads, spans: list[Span], index_TK: Tensor | None, scale: float
) -> Iterator[Tensor]:
    """Documents with no past, padded at the end, where causality keeps padding out of sight."""
    device = heads.query_THD.device
    offset_L = torch.arange(spans[0].keys, device=device)  # the first span is the longest
    length_B1 = torch.tensor([[span.keys] for span in spans], device=device)
    inside_BL = torch.minimum(offset_L, length_B1 - 1)
    query_BL = inside_BL + torch.tensor([[span.query] for span in spans], device=device)
    key_BL = inside_BL + torch.tensor([[span.key] for span in spans], device=device)
    if len(spans) == 1:
        q, k, v = (x.unsqueeze(0).transpose(1, 2) for x in _slices(heads, spans[0]))
    else:
        q, k, v = (
            x[index].transpose(1, 2)
            for x, index in zip(heads, (query_BL, key_BL, key_BL), strict=True)
        )
    if index_TK is None:
        out_BHLD = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    else:
        local_BLK = torch.where(
            index_TK[query_BL] < 0, -1, index_TK[query_BL] - key_BL[:, :1, None]
        )
        out_BHLD = torch.cat([*_under_masks(q, k, v, local_BLK, scale)], dim=2)
    for out_LHD, span in zip(out_BHLD.transpose(1, 2), spans, strict=True):
        yield out_LHD[: span.queries]


def _under_masks(
    q: Tensor, k: Tensor, v: Tensor, local_BLK: Tensor, scale: float
) -> Iterator[Tensor]:
    """Queries in a few runs, so that early ones are not multiplied with keys they cannot see."""
    L = q.shape[2]
    run = -(-L // MASKED_RUNS)
    for start in range(0, L, run):
        stop = min(start + run, L)
        yield F.scaled_dot_product_attention(
            q[:, :, start:stop],
            k[:, :, :stop],
            v[:, :, :stop],
            attn_mask=_kept_mask(local_BLK[:, start:stop], start, stop),
            scale=scale,
        )


def _kept_mask(local_BQK: Tensor, start: int, stop: int) -> Tensor:
    """[B, 1, Q, stop]: the kept keys of queries start..stop, or all before one that names none."""
    B, Q, _ = local_BQK.shape
    spare_BQK = torch.where(local_BQK < 0, stop, local_BQK).long()
    kept = torch.zeros(B, Q, stop + 1, dtype=torch.bool, device=local_BQK.device)
    kept_BQS = kept.scatter_(2, spare_BQK, True)[:, :, :stop]
    past_QS = torch.ones(Q, stop, dtype=torch.bool, device=local_BQK.device).tril(start)
    return torch.where(local_BQK[:, :, :1] < 0, past_QS, kept_BQS).unsqueeze(1)


def _continued(heads: _Heads, span: Span, scale: float, window: int | None) -> Tensor:
    """Queries that continue a past, or look back through a window: an explicit mask, by chunks."""
    query_NHD, key_MHD, value_MHD = _slices(heads, span)
    device = query_NHD.device
    pieces = []
    for q in chunks(span.queries, row_bytes=4 * min(span.keys, 2 * (window or span.keys))):
        last = span.past + q.stop
        first = 0 if window is None else max(0, span.past + q.start - window + 1)
        position_Q1 = torch.arange(span.past + q.start, last, device=device).unsqueeze(1)
        ahead_QM = position_Q1 - torch.arange(first, last, device=device)
        visible_QM = ahead_QM >= 0 if window is None else (ahead_QM >= 0) & (ahead_QM < window)
        out_HQV = F.scaled_dot_product_attention(
            query_NHD[q].transpose(0, 1).unsqueeze(0),
            key_MHD[first:last].transpose(0, 1).unsqueeze(0),
            value_MHD[first:last].transpose(0, 1).unsqueeze(0),
            attn_mask=None if q.stop - q.start == 1 else visible_QM,
            scale=scale,
        ).squeeze(0)
        pieces.append(out_HQV.transpose(0, 1))
    return torch.cat(pieces)


def _slices(heads: _Heads, span: Span) -> tuple[Tensor, Tensor, Tensor]:
    query_THD, key_SHD, value_SHD = heads
    return query_THD[span.query_slice], key_SHD[span.key_slice], value_SHD[span.key_slice]
