"""GPU kernels of the indexer's loss: blocks of queries in bounded scratch memory.

Loss and the gradients of queries and weights are bitwise identical between two runs. So do those of
the keys over documents that share none; over selected keys they are sums in whatever order queries
arrive, and agree where torch.use_deterministic_algorithms asks for it: then they are whole numbers.
A query that keeps no key adds nothing.

T queries, S keys, Q queries of one block, H heads of either side, D index dim, K kept.
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

MOST_HEADS, MOST_DIM = 128, 128
SHARED_BYTES = 200 << 10  # of a thread block, as from Hopper on; the largest tile takes 160
PAIR_BYTES = 4 + 4 + 2  # a score, a target, a gradient
# Loss, and the three gradients as wide sums; None where nobody wants them.
Answer = tuple[Tensor, IndexerInputs | None]


def suits(index: IndexerInputs, attention: IndexerTarget) -> bool:
    """Whether the kernels apply: halves of one type on a Hopper-class GPU."""
    halves = (index.query_THD, index.key_SD, *attention[:2])
    return (
        can_use_kernel("index_kl", *halves)
        and len({x.dtype for x in halves}) == 1
        and all(x.numel() > 0 for x in halves)
        and attention.scale > 0  # a largest product is then a largest score
        and max(index.query_THD.shape[1], attention.query_THC.shape[1]) <= MOST_HEADS
        and index.query_THD.shape[2] <= MOST_DIM
        and _roomy(index.key_SD.get_device())
    )


@cache
def _roomy(device: int) -> bool:
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
    """Gradients are computed while the scores are at hand, and only scaled later."""

    @staticmethod
    def forward(
        ctx: Any, answer: Callable[[IndexerInputs, bool], Answer], *index: Tensor
    ) -> Tensor:
        query_THD, key_SD, weight_TH = (x.detach().contiguous() for x in index)
        wanted = any(ctx.needs_input_grad[1:])
        loss, grads = answer(IndexerInputs(query_THD, key_SD, weight_TH.float()), wanted)
        if grads is not None:
            ctx.save_for_backward(*(g.to(x.dtype) for g, x in zip(grads, index, strict=True)))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(grads[0].to(saved.dtype) * saved for saved in ctx.saved_tensors)


def _dense(
    attention: IndexerTarget, spans: tuple[Span, ...], index: IndexerInputs, wanted: bool
) -> Answer:
    from paddock.kernels.index_scores.triton import scores

    from . import triton as kernels

    device = index.key_SD.device
    loss = torch.zeros((), device=device)
    grads = _nothing(index, (kernels.SHARES, *index.key_SD.shape)) if wanted else None
    for block, key_tile_N8 in plan(spans, device, scratch_bytes(device)):
        score, target, grad = _rectangles(*block.shape, index.query_THD)
        scores(index.query_THD, IndexKeys(index.key_SD), index.weight_TH, block, score)
        kernels.dense_target(attention, block, target)
        loss += kernels.losses(score, target, grad if wanted else None, block.visible_R).sum()
        if grads is not None:
            kernels.dense_gradients(index, grad, block, key_tile_N8, grads)
    return loss, None if grads is None else grads._replace(key_SD=grads.key_SD.sum(0))


def _kept(attention: IndexerTarget, index_TK: Tensor, index: IndexerInputs, wanted: bool) -> Answer:
    from paddock.kernels.index_scores.triton import scores

    from . import triton as kernels

    (T, K), device = index_TK.shape, index_TK.device
    fixed = torch.are_deterministic_algorithms_enabled()
    loss, unit = torch.zeros((), device=device), _unit(index, fixed=fixed)
    grads = _nothing(index, index.key_SD.shape, whole=fixed) if wanted else None
    for q in chunks(T, PAIR_BYTES * _whole(K), scratch_bytes(device)):
        mine = IndexerInputs(index.query_THD[q], index.key_SD, index.weight_TH[q])
        teacher = attention._replace(query_THC=attention.query_THC[q])
        kept_QK = index_TK[q]
        score, target, grad = _rectangles(len(kept_QK), _whole(K), index.query_THD)
        slots = kept_QK.clamp(min=0).view(-1)
        scores(mine.query_THD, IndexKeys(mine.key_SD, slots), mine.weight_TH, _each(kept_QK), score)
        kernels.kept_target(teacher, kept_QK, target)
        loss += kernels.losses(score, target, grad if wanted else None, kept_QK).sum()
        if grads is not None:
            part = grads._replace(query_THD=grads.query_THD[q], weight_TH=grads.weight_TH[q])
            kernels.kept_gradients(mine, grad, kept_QK, unit, part)
    if grads is None:
        return loss, None
    return loss, grads._replace(key_SD=from_sums(grads.key_SD, unit, torch.float32))


def _nothing(index: IndexerInputs, keys: Sequence[int], *, whole: bool = False) -> IndexerInputs:
    """Zeros: queries outside all spans have no gradient, and keys have a sum."""
    query_THD, key_SD, weight_TH = index
    dtype = torch.int64 if whole else torch.float32
    return IndexerInputs(
        torch.zeros_like(query_THD),
        torch.zeros(*keys, dtype=dtype, device=key_SD.device),
        torch.zeros_like(weight_TH),
    )


def _unit(index: IndexerInputs, *, fixed: bool) -> Tensor:
    """[1] in which gradients of keys are counted: a sum of one contribution per query, at most
    its weight times its head for every head, fits a whole number."""
    if not fixed:
        return torch.ones(1, device=index.key_SD.device)
    T, H = index.weight_TH.shape
    weight, query = (x.abs().amax().double() for x in (index.weight_TH, index.query_THD))
    # Factors are rounded to bfloat16 on the way: one percent is more than enough.
    exponent = SUM_BITS - (1.01 * T * H * weight * query).log2().ceil()
    return torch.exp2(exponent.clamp(max=LARGEST_EXPONENT)).float().view(1)


def _rectangles(rows: int, width: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores and targets in float32; gradients as they will be multiplied, which for halves is as
    bfloat16: small probabilities are below what float16 can hold."""
    half = torch.bfloat16 if like.dtype.itemsize == 2 else torch.float32
    score, target = (torch.empty(rows, width, device=like.device) for _ in range(2))
    return score, target, torch.empty(rows, width, dtype=half, device=like.device)


def _each(kept_QK: Tensor) -> ScoreBlock:
    """Every query on its own, its keys one after the other in the flattened choice."""
    (Q, K), device = kept_QK.shape, kept_QK.device
    row_Q = torch.arange(Q, dtype=torch.int32, device=device)
    tile_Q8 = row_Q.new_zeros(Q, FIELDS)
    tile_Q8[:, 0], tile_Q8[:, 1], tile_Q8[:, 2] = row_Q, 1, row_Q * K
    tile_Q8[:, 3], tile_Q8[:, 4] = K, row_Q
    return ScoreBlock(slice(0, Q), _whole(K), True, tile_Q8, torch.full_like(row_Q, K), row_Q * K)


def _whole(keys: int) -> int:
    return -(-keys // WIDTH) * WIDTH


@lru_cache(maxsize=8)  # every layer of a step asks for the same
def plan(
    spans: tuple[Span, ...], device: torch.device, budget: int
) -> tuple[tuple[ScoreBlock, Tensor], ...]:
    """Blocks of queries whose rectangles fit in `budget` bytes, each with its tiles of keys: key,
    keys, column, and the tiles of queries, from one to before another, that see one of them."""
    found = []
    for block in blocks(spans, 0, device, budget * 4 // PAIR_BYTES):
        rows = np.array(list(key_tiles(spans, block.rows, 1 if block.few else MANY)), np.int32)
        table_N8 = np.pad(rows, ((0, 0), (0, FIELDS - rows.shape[1])))
        found.append((block, torch.from_numpy(table_N8).to(device)))
    return tuple(found)


def key_tiles(
    spans: Sequence[Span], rows: slice, size: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """Of the queries `rows`, counted in the spans' order and cut in tiles of `size`.

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
