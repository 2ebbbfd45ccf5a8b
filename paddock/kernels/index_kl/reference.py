"""Reference of the indexer's KL loss.

T queries, S keys, H heads of either side, D index dim, C row width, K selected, Q a chunk of T.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from paddock.kernels.index_scores.reference import index_scores
from paddock.kernels.precision import opmath_dtype
from paddock.kernels.spans import Span
from paddock.kernels.workspace import chunks, scratch_bytes


class IndexerInputs(NamedTuple):
    """The student: queries, keys and weights of the indexer."""

    query_THD: Tensor
    key_SD: Tensor
    weight_TH: Tensor


class IndexerTarget(NamedTuple):
    """The teacher: absorbed queries and latent KV entries of the attention."""

    query_THC: Tensor
    row_SC: Tensor
    scale: float


def index_kl(index: IndexerInputs, attention: IndexerTarget, spans: Sequence[Span]) -> Tensor:
    """Over every key a query sees; see the package's contract."""
    return _Sum.apply(_dense_pieces(attention, spans), *index)  # type: ignore[no-any-return]


def index_kl_topk(index: IndexerInputs, attention: IndexerTarget, index_TK: Tensor) -> Tensor:
    """Over the selected keys only; see the package's contract."""
    return _Sum.apply(_kept_pieces(attention, index_TK), *index)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """One chunk of queries: their keys, target distribution and mask."""

    queries: slice
    keys: slice
    kept_QK: Tensor | None  # which of `keys` are candidates; None: all, in order
    target_QS: Tensor
    hidden_QS: Tensor

    def loss(self, query_QHD: Tensor, key_SD: Tensor, weight_QH: Tensor) -> Tensor:
        score_QS = (
            index_scores(query_QHD, key_SD, weight_QH)
            if self.kept_QK is None
            else _kept_scores(query_QHD, key_SD[self.kept_QK], weight_QH)
        )
        return _kl(self.target_QS, score_QS.masked_fill(self.hidden_QS, float("-inf")))


class _Sum(torch.autograd.Function):
    """Sums the loss over chunks; the gradients of each chunk are computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, pieces: Iterable[_Piece], *index: Tensor) -> Tensor:
        total = torch.zeros((), dtype=opmath_dtype(index[0].dtype), device=index[0].device)
        grads = [torch.zeros_like(leaf, dtype=total.dtype) for leaf in index]
        needs_grad = any(ctx.needs_input_grad[1:])
        for piece in pieces:
            views = (piece.queries, piece.keys, piece.queries)
            leaves = [
                x[at].detach().requires_grad_(needs_grad)
                for x, at in zip(index, views, strict=True)
            ]
            # Saved tensors are used at once: hooks of the caller (recompute, offload) are bypassed.
            with torch.set_grad_enabled(needs_grad), saved_tensors_hooks(_identity, _identity):
                loss = piece.loss(*leaves)
            total += loss.detach()
            if needs_grad:
                parts = torch.autograd.grad(loss, leaves)
                for grad, at, part in zip(grads, views, parts, strict=True):
                    grad[at] += part
        ctx.save_for_backward(*(g.to(x.dtype) for g, x in zip(grads, index, strict=True)))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(grads[0].to(saved.dtype) * saved for saved in ctx.saved_tensors)


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _dense_pieces(attention: IndexerTarget, spans: Sequence[Span]) -> Iterator[_Piece]:
    for span in spans:
        heads = attention.query_THC.shape[1]
        budget = scratch_bytes(attention.row_SC.device)
        for q in chunks(span.queries, 4 * heads * span.keys, budget):
            part = span.part(q.start, q.stop)
            position_Q1 = torch.arange(part.past, part.keys, device=attention.row_SC.device)[
                :, None
            ]
            hidden_QS = torch.arange(part.keys, device=attention.row_SC.device) > position_Q1
            row_SC = attention.row_SC[part.key_slice].unsqueeze(0)
            target_QS = _target(attention, part.query_slice, row_SC, hidden_QS)
            yield _Piece(part.query_slice, part.key_slice, None, target_QS, hidden_QS)


def _kept_pieces(attention: IndexerTarget, index_TK: Tensor) -> Iterator[_Piece]:
    T, K = index_TK.shape
    heads, width = attention.query_THC.shape[1:]
    for q in chunks(T, 4 * K * max(heads, width), scratch_bytes(index_TK.device)):
        kept_QK, hidden_QK = index_TK[q].clamp(min=0), index_TK[q] < 0
        target_QK = _target(attention, q, attention.row_SC[kept_QK], hidden_QK)
        yield _Piece(q, slice(None), kept_QK, target_QK, hidden_QK)


def _target(attention: IndexerTarget, q: slice, row_QSC: Tensor, hidden_QS: Tensor) -> Tensor:
    """Attention averaged over heads; row_QSC may have one leading entry for all queries."""
    row_QSC = row_QSC.detach().to(opmath_dtype(row_QSC.dtype))
    query_QHC = attention.query_THC[q].detach().to(row_QSC.dtype)
    score_QHS = (query_QHC * attention.scale) @ row_QSC.mT
    return score_QHS.masked_fill_(hidden_QS.unsqueeze(1), float("-inf")).softmax(-1).mean(1)


def _kept_scores(query_QHD: Tensor, key_QKD: Tensor, weight_QH: Tensor) -> Tensor:
    dtype = opmath_dtype(query_QHD.dtype)
    match_QHK = (query_QHD.to(dtype) @ key_QKD.to(dtype).mT).relu()
    return torch.bmm(weight_QH.to(dtype).unsqueeze(1), match_QHK).squeeze(1)


def _kl(target_QS: Tensor, score_QS: Tensor) -> Tensor:
    """Sum over rows of KL(target || softmax(score)); hidden keys have target 0, score -inf."""
    # 0 * -inf would be NaN: such pairs must contribute exactly zero.
    log_QS = score_QS.log_softmax(-1).masked_fill(target_QS == 0, 0.0)
    return (torch.special.xlogy(target_QS, target_QS) - target_QS * log_QS).sum()
