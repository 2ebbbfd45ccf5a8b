"""Reference of causal attention, on top of scaled_dot_product_attention.

T queries, S keys, H heads, G key heads, D query/key dim, V value dim; N queries and M keys of one
span or of all whole ones; B spans in one padded batch of L slots each, P slots in all.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
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
    whole = [s for s in spans if s.past == 0 and (window is None or s.keys <= window)]
    out_NHV = _whole(heads, whole, None, scale) if whole else query_THD[:0]
    if len(whole) < len(spans):
        ready = iter(out_NHV.split([span.queries for span in whole]))
        known = set(whole)
        out_NHV = torch.cat(
            [
                next(ready) if s in known else _with_cached_keys(heads, s, scale, window)
                for s in spans
            ]
        )
    return out_NHV[..., : value_SGV.shape[-1]]


def topk_masked_attention(
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
    return _whole(heads, spans, index_TK, scale)[..., : value_SGV.shape[-1]]


class _Heads(NamedTuple):
    """Queries, keys and values with as many heads and as wide heads as each other.

    The fused kernels need one head width; zeros change neither the scores nor the value columns.
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


class _PaddedLayout(NamedTuple):
    """Layout of documents padded to batches, longest first."""

    shapes: list[tuple[int, int]]  # of each batch: B documents of L slots
    query_P: Tensor  # row of each slot; past the end of a document its last row
    key_P: Tensor
    query_N: Tensor  # rows in the order of the spans,
    key_N: Tensor
    slot_N: Tensor  # and the slot of each

    @classmethod
    def of(cls, spans: Sequence[Span], device: torch.device) -> "_PaddedLayout":
        batches = list(_batches(spans))
        order = np.array([i for batch in batches for i in batch])
        shapes = [(len(batch), spans[batch[0]].keys) for batch in batches]
        padded_len = np.repeat([L for _, L in shapes], [B for B, _ in shapes])
        size, query, key = np.array([(s.keys, s.query, s.key) for s in spans]).T
        within_P = np.minimum(_segment_arange(padded_len), np.repeat(size[order] - 1, padded_len))
        start = np.empty_like(padded_len)
        start[order] = np.cumsum(padded_len) - padded_len
        within_N = _segment_arange(size)
        found = (
            within_P + np.repeat(query[order], padded_len),
            within_P + np.repeat(key[order], padded_len),
            within_N + np.repeat(query, size),
            within_N + np.repeat(key, size),
            within_N + np.repeat(start, size),
        )
        return cls(shapes, *(torch.from_numpy(x).to(device) for x in found))


def _segment_arange(sizes: np.ndarray) -> np.ndarray:
    """
    >>> _segment_arange(np.array([3, 1, 2])).tolist()
    [0, 1, 2, 0, 0, 1]
    """
    return np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def _batches(spans: Sequence[Span]) -> Iterator[list[int]]:
    """Indices of spans without cached keys, grouped so that little is padded."""
    batch: list[int] = []
    for i in sorted(range(len(spans)), key=lambda i: -spans[i].keys):
        if batch and spans[i].keys < SHORTEST_OF_LONGEST * spans[batch[0]].keys:
            yield batch
            batch = []
        batch.append(i)
    yield batch


class _Pad(torch.autograd.Function):
    """Rows to padded slots. Slots that only repeat a row as padding get no gradient."""

    @staticmethod
    def forward(ctx: Any, x_SHD: Tensor, row_P: Tensor, row_N: Tensor, slot_N: Tensor) -> Tensor:
        ctx.save_for_backward(row_N, slot_N)
        ctx.shape = x_SHD.shape
        return x_SHD.index_select(0, row_P)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PHD: Tensor) -> tuple[Tensor, None, None, None]:
        row_N, slot_N = ctx.saved_tensors
        grad_SHD = grad_PHD.new_zeros(ctx.shape)
        grad_SHD[row_N] = grad_PHD.index_select(0, slot_N)
        return grad_SHD, None, None, None


class _Unpad(torch.autograd.Function):
    """Slots back to rows."""

    @staticmethod
    def forward(ctx: Any, x_PHD: Tensor, slot_N: Tensor) -> Tensor:
        ctx.save_for_backward(slot_N)
        ctx.shape = x_PHD.shape
        return x_PHD.index_select(0, slot_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NHD: Tensor) -> tuple[Tensor, None]:
        (slot_N,) = ctx.saved_tensors
        grad_PHD = grad_NHD.new_zeros(ctx.shape)
        grad_PHD[slot_N] = grad_NHD
        return grad_PHD, None


def _whole(heads: _Heads, spans: Sequence[Span], index_TK: Tensor | None, scale: float) -> Tensor:
    """Whole documents, padded at the end, where the causal mask hides the padding."""
    layout = _PaddedLayout.of(spans, heads.query_THD.device)
    if len(spans) == 1:
        padded = _slices(heads, spans[0])
    else:
        padded = (
            _Pad.apply(heads.query_THD, layout.query_P, layout.query_N, layout.slot_N),
            _Pad.apply(heads.key_SHD, layout.key_P, layout.key_N, layout.slot_N),
            _Pad.apply(heads.value_SHD, layout.key_P, layout.key_N, layout.slot_N),
        )
    sizes = [B * L for B, L in layout.shapes]
    rows = zip(layout.query_P.split(sizes), layout.key_P.split(sizes), strict=True)
    out = []
    for shape, (query_P, key_P), *qkv in zip(
        layout.shapes, rows, *(x.split(sizes) for x in padded), strict=True
    ):
        q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in qkv)
        kept_PK = None if index_TK is None else index_TK[query_P]
        if kept_PK is None or not bool((kept_PK[:, 0] >= 0).any()):
            out_BHLD = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        else:
            first_P1 = key_P.view(shape)[:, :1].expand(shape).reshape(-1, 1)
            local_BLK = torch.where(kept_PK < 0, -1, kept_PK - first_P1).unflatten(0, shape)
            out_BHLD = torch.cat([*_under_masks(q, k, v, local_BLK, scale)], dim=2)
        out.append(out_BHLD.transpose(1, 2).flatten(0, 1))
    out_PHD = out[0] if len(out) == 1 else torch.cat(out)
    return out_PHD if len(spans) == 1 else _Unpad.apply(out_PHD, layout.slot_N)


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
    """[B, 1, Q, stop]: selected keys of queries start..stop; all earlier ones if none is."""
    B, Q, _ = local_BQK.shape
    spare_BQK = torch.where(local_BQK < 0, stop, local_BQK).long()
    kept = torch.zeros(B, Q, stop + 1, dtype=torch.bool, device=local_BQK.device)
    kept_BQS = kept.scatter_(2, spare_BQK, True)[:, :, :stop]
    causal_QS = torch.ones(Q, stop, dtype=torch.bool, device=local_BQK.device).tril(start)
    return torch.where(local_BQK[:, :, :1] < 0, causal_QS, kept_BQS).unsqueeze(1)


def _with_cached_keys(heads: _Heads, span: Span, scale: float, window: int | None) -> Tensor:
    """Queries after cached keys or with a window: an explicit mask, in chunks."""
    query_NHD, key_MHD, value_MHD = _slices(heads, span)
    device = query_NHD.device
    pieces = []
    for q in chunks(span.queries, row_bytes=4 * min(span.keys, 2 * (window or span.keys))):
        last = span.past + q.stop
        first = 0 if window is None else max(0, span.past + q.start - window + 1)
        position_Q1 = torch.arange(span.past + q.start, last, device=device).unsqueeze(1)
        distance_QM = position_Q1 - torch.arange(first, last, device=device)
        visible_QM = (
            distance_QM >= 0 if window is None else (distance_QM >= 0) & (distance_QM < window)
        )
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
