"""GPU kernels of the indexer's loss: blocks of queries in bounded scratch memory.

Loss and the gradients of queries and weights are bitwise identical between two runs, and so are key
gradients over documents without common keys. Over selected keys, key gradients are summed in the
order in which programs finish; under torch.use_deterministic_algorithms they are summed as integers
and bitwise identical too. A query without selected keys adds nothing.

T queries, S keys, Q queries of one block, H heads of either side, D index dim, K selected.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paddock.kernels.dispatch import can_use_kernel
from paddock.kernels.index_scores.blocks import FIELDS, MANY, WIDTH, ScoreBlock, blocks
from paddock.kernels.index_scores.reference import IndexKeys
from paddock.kernels.spans import Span
from paddock.kernels.sparse_mla.problem import LARGEST_EXPONENT, SUM_BITS, from_sums
from paddock.kernels.workspace import chunks, scratch_bytes

from .reference import IndexerInputs, IndexerTarget

MAX_HEADS, MAX_INDEX_DIM = 128, 128
SHARED_BYTES = 200 << 10  # of a thread block, as from Hopper on; the largest tile takes 160
PAIR_BYTES = 4 + 4 + 2  # a score, a target, a gradient
# Loss, and the three gradients as float32 sums or None.
_LossAndGrads = tuple[Tensor, IndexerInputs | None]


def suits(index: IndexerInputs, attention: IndexerTarget) -> bool:
    """Whether the kernels apply: halves of one type on a Hopper-class GPU."""
    halves = (index.query_THD, index.key_SD, *attention[:2])
    return (
        can_use_kernel("index_kl", *halves)
        and len({x.dtype for x in halves}) == 1
        and all(x.numel() > 0 for x in halves)
        and attention.scale > 0  # so the largest product is the largest score
        and max(index.query_THD.shape[1], attention.query_THC.shape[1]) <= MAX_HEADS
        and index.query_THD.shape[2] <= MAX_INDEX_DIM
        and _has_shared_memory(index.key_SD.get_device())
    )


@cache
def _has_shared_memory(device: int) -> bool:
    properties = torch.cuda.get_device_properties(device)
    return bool(getattr(properties, "shared_memory_per_block_optin", 0) >= SHARED_BYTES)


def index_kl(index: IndexerInputs, attention: IndexerTarget, spans: Sequence[Span]) -> Tensor:
    """Over every key a query sees; see the package's contract."""
    return _Loss.apply(partial(_dense, _detached(attention), tuple(spans)), *index)  # type: ignore[no-any-return]


def index_kl_topk(index: IndexerInputs, attention: IndexerTarget, index_TK: Tensor) -> Tensor:
    """Over the selected keys only; see the package's contract."""
    index_TK = index_TK.int().contiguous()
    return _Loss.apply(partial(_kept, _detached(attention), index_TK), *index)  # type: ignore[no-any-return]


def _detached(attention: IndexerTarget) -> IndexerTarget:
    query_THC, row_SC = attention.query_THC.detach(), attention.row_SC.detach()
    return IndexerTarget(_dense_columns(query_THC), _dense_columns(row_SC), attention.scale)


def _dense_columns(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _Loss(torch.autograd.Function):
    """Gradients are computed in the forward pass; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[[IndexerInputs, bool], _LossAndGrads], *index: Tensor
    ) -> Tensor:
        query_THD, key_SD, weight_TH = (x.detach().contiguous() for x in index)
        needs_grad = any(ctx.needs_input_grad[1:])
        loss, grads = compute(IndexerInputs(query_THD, key_SD, weight_TH.float()), needs_grad)
        if grads is not None:
            ctx.save_for_backward(*(g.to(x.dtype) for g, x in zip(grads, index, strict=True)))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(grads[0].to(saved.dtype) * saved for saved in ctx.saved_tensors)


def _dense(
    attention: IndexerTarget, spans: tuple[Span, ...], index: IndexerInputs, needs_grad: bool
) -> _LossAndGrads:
    from paddock.kernels.index_scores.triton import scores

    from . import triton as kernels

    device = index.key_SD.device
    loss = torch.zeros((), device=device)
    grads = _zero_grads(index, (kernels.SHARES, *index.key_SD.shape)) if needs_grad else None
    for block, key_tile_N8 in plan(spans, device, scratch_bytes(device)):
        score, target, grad = _rectangles(*block.shape, index.query_THD)
        scores(index.query_THD, IndexKeys(index.key_SD), index.weight_TH, block, score)
        kernels.dense_target(attention, block, target)
        loss += kernels.losses(score, target, grad if needs_grad else None, block.visible_R).sum()
        if grads is not None:
            kernels.dense_gradients(index, grad, block, key_tile_N8, grads)
    return loss, None if grads is None else grads._replace(key_SD=grads.key_SD.sum(0))


def _kept(
    attention: IndexerTarget, index_TK: Tensor, index: IndexerInputs, needs_grad: bool
) -> _LossAndGrads:
    from paddock.kernels.index_scores.triton import scores

    from . import triton as kernels

    (T, K), device = index_TK.shape, index_TK.device
    fixed = torch.are_deterministic_algorithms_enabled()
    loss, unit = torch.zeros((), device=device), _unit(index, fixed=fixed)
    grads = _zero_grads(index, index.key_SD.shape, integer=fixed) if needs_grad else None
    for q in chunks(T, PAIR_BYTES * _padded_width(K), scratch_bytes(device)):
        chunk = IndexerInputs(index.query_THD[q], index.key_SD, index.weight_TH[q])
        target_inputs = attention._replace(query_THC=attention.query_THC[q])
        kept_QK = index_TK[q]
        score, target, grad = _rectangles(len(kept_QK), _padded_width(K), index.query_THD)
        slots = kept_QK.clamp(min=0).view(-1)
        scores(
            chunk.query_THD,
            IndexKeys(chunk.key_SD, slots),
            chunk.weight_TH,
            _tile_per_query(kept_QK),
            score,
        )
        kernels.kept_target(target_inputs, kept_QK, target)
        loss += kernels.losses(score, target, grad if needs_grad else None, kept_QK).sum()
        if grads is not None:
            part = grads._replace(query_THD=grads.query_THD[q], weight_TH=grads.weight_TH[q])
            kernels.kept_gradients(chunk, grad, kept_QK, unit, part)
    if grads is None:
        return loss, None
    return loss, grads._replace(key_SD=from_sums(grads.key_SD, unit, torch.float32))


def _zero_grads(
    index: IndexerInputs, keys: Sequence[int], *, integer: bool = False
) -> IndexerInputs:
    """Zeros: queries outside all spans have no gradient, and key gradients are summed."""
    query_THD, key_SD, weight_TH = index
    dtype = torch.int64 if integer else torch.float32
    return IndexerInputs(
        torch.zeros_like(query_THD),
        torch.zeros(*keys, dtype=dtype, device=key_SD.device),
        torch.zeros_like(weight_TH),
    )


def _unit(index: IndexerInputs, *, fixed: bool) -> Tensor:
    """[1], the fixed-point unit of key gradients: a sum of one contribution per query, at most
    weight times query for every head, fits in an int64."""
    if not fixed:
        return torch.ones(1, device=index.key_SD.device)
    T, H = index.weight_TH.shape
    weight, query = (x.abs().amax().double() for x in (index.weight_TH, index.query_THD))
    # Factors are rounded to bfloat16: one percent is more than enough.
    exponent = SUM_BITS - (1.01 * T * H * weight * query).log2().ceil()
    return torch.exp2(exponent.clamp(max=LARGEST_EXPONENT)).float().view(1)


def _rectangles(rows: int, width: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores and targets in float32; gradients in the dtype of the next product, which for halves
    is bfloat16: small probabilities are below what float16 can hold."""
    half = torch.bfloat16 if like.dtype.itemsize == 2 else torch.float32
    score, target = (torch.empty(rows, width, device=like.device) for _ in range(2))
    return score, target, torch.empty(rows, width, dtype=half, device=like.device)


def _tile_per_query(kept_QK: Tensor) -> ScoreBlock:
    """One tile per query; its keys are consecutive in the flattened index."""
    (Q, K), device = kept_QK.shape, kept_QK.device
    row_Q = torch.arange(Q, dtype=torch.int32, device=device)
    tile_Q8 = row_Q.new_zeros(Q, FIELDS)
    tile_Q8[:, 0], tile_Q8[:, 1], tile_Q8[:, 2] = row_Q, 1, row_Q * K
    tile_Q8[:, 3], tile_Q8[:, 4] = K, row_Q
    return ScoreBlock(
        slice(0, Q), _padded_width(K), True, tile_Q8, torch.full_like(row_Q, K), row_Q * K
    )


def _padded_width(keys: int) -> int:
    return -(-keys // WIDTH) * WIDTH


@lru_cache(maxsize=8)  # the same for every layer of a step
def plan(
    spans: tuple[Span, ...], device: torch.device, budget: int
) -> tuple[tuple[ScoreBlock, Tensor], ...]:
    """Blocks of queries whose rectangles fit in `budget` bytes, each with its tiles of keys: key,
    keys, column, and the range of query tiles that see one of them."""
    found = []
    for block in blocks(spans, 0, device, budget * 4 // PAIR_BYTES):
        rows = np.array(list(key_tiles(spans, block.rows, 1 if block.few else MANY)), np.int32)
        table_N8 = np.pad(rows, ((0, 0), (0, FIELDS - rows.shape[1])))
        found.append((block, torch.from_numpy(table_N8).to(device)))
    return tuple(found)


def key_tiles(
    spans: Sequence[Span], rows: slice, size: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """Key tiles of the queries `rows`, counted in the order of the spans, in tiles of `size`.

    >>> list(key_tiles([Span(0, 3, 5, 3), Span(3, 70, 8, 130)], slice(0, 73), 64))
    [(5, 3, 0, 0, 1), (8, 128, 0, 1, 3), (136, 2, 128, 2, 3)]
    """
    row = tile = 0
    for span in spans:
        start, stop = max(rows.start - row, 0), min(rows.stop - row, span.queries)
        row += span.queries
        if start >= stop:
            continue
        part = span.part(start, stop)
        end = tile + -(-part.queries // size)
        for column in range(0, part.keys, WIDTH):
            first = tile + max(column - part.past, 0) // size
            yield part.key + column, min(WIDTH, part.keys - column), column, first, end
        tile = end
