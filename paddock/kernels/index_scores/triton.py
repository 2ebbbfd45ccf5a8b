"""Scores of one block of queries, by the tensor cores where the inputs are halves or 8-bit floats.

A block's scratch is a rectangle (see blocks.py). Every entry a query may see is written, and others
up to the end of its last key tile; the rest is left as it was and must not be read.

H heads, D head dim; BQ queries x BS keys a tile; BH and BD powers of two that hold H and D.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paddock.kernels.block_table import BlockTable

from .blocks import FIELDS, MANY, WIDTH, ScoreBlock
from .reference import IndexKeys

FEW_SPAN = 512  # keys that a program of the few-queries form walks over
GROUP = 32  # tiles of the many-queries form that share a stretch of keys: GLM-5's take 17 MB
WARPS, STAGES = 4, 2


@triton.jit(do_not_specialize=["tiles", "steps"])
def _many_queries(
    Q, W, K, SCALE, SLOT, TILE, OUT, ld, q_stride, h_stride, k_stride, tiles, steps,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr,
    FIELDS: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries are the rows of a product, keys its columns, heads a loop: the sum over heads is an
    accumulator in registers.

    A group of tiles walks over its keys together, so that their queries stay in the cache; the
    longest rows go first.
    """
    group = tl.program_id(0) // (GROUP * steps)
    within = tl.program_id(0) - group * GROUP * steps
    size = tl.minimum(tiles - group * GROUP, GROUP)
    tile = TILE + (tiles - 1 - group * GROUP - within % size) * FIELDS
    query, count, key, seen, row = (
        tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
    )  # fmt: skip
    s0 = within // size * BS
    if s0 < seen:
        m, s, d = tl.arange(0, BQ), tl.arange(0, BS), tl.arange(0, BD)
        held = (d < D)[None, :]
        # Beyond the last query or key the last one is read again, so that nothing needs a mask.
        at_key = key + tl.minimum(s0 + s, seen - 1)
        if SLOT is not None:
            at_key = tl.load(SLOT + at_key)
        k_at = K + at_key.to(tl.int64)[:, None] * k_stride + d[None, :]
        k = tl.load(k_at) if D == BD else tl.load(k_at, mask=held, other=0.0)
        at_query = (query + tl.minimum(m, count - 1)).to(tl.int64)
        q_at = Q + at_query[:, None] * q_stride + d[None, :]
        w_at = W + at_query * H
        score = tl.zeros([BQ, BS], tl.float32)
        for h in range(H):
            q_h = q_at + h * h_stride
            q = tl.load(q_h) if D == BD else tl.load(q_h, mask=held, other=0.0)
            w = tl.load(w_at + h)
            match = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            score = tl.fma(tl.maximum(match, 0.0), tl.broadcast_to(w[:, None], [BQ, BS]), score)
        if SCALE is not None:
            score = score * tl.load(SCALE + at_key)[None, :]
        out = OUT + (row + m).to(tl.int64)[:, None] * ld + (s0 + s)[None, :]
        tl.store(out, score, mask=(m < count)[:, None])


@triton.jit
def _few_queries(
    Q, W, K, SCALE, SLOT, TILE, OUT, ld, q_stride, h_stride, k_stride,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, BS: tl.constexpr,
    SPAN: tl.constexpr, FIELDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One query: keys are the rows of a product, its heads the columns. Bound by reading keys."""
    tile = TILE + tl.program_id(0) * FIELDS
    query, key = tl.load(tile), tl.load(tile + 2)
    seen, row = tl.load(tile + 3), tl.load(tile + 4)
    begin = tl.program_id(1) * SPAN
    if begin < seen:
        h, s, d = tl.arange(0, BH), tl.arange(0, BS), tl.arange(0, BD)
        held = (d < D)[None, :]
        q_at = Q + query.to(tl.int64) * q_stride + h[:, None] * h_stride + d[None, :]
        q = tl.load(q_at, mask=(h < H)[:, None] & held, other=0.0)
        w = tl.load(W + query.to(tl.int64) * H + h, mask=h < H, other=0.0)
        out = OUT + row.to(tl.int64) * ld
        for step in range(0, SPAN, BS):
            at = begin + step + s
            at_key = key + tl.minimum(at, seen - 1)
            if SLOT is not None:
                at_key = tl.load(SLOT + at_key)
            k_at = K + at_key.to(tl.int64)[:, None] * k_stride + d[None, :]
            k = tl.load(k_at) if D == BD else tl.load(k_at, mask=held, other=0.0)
            match = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            score = tl.sum(tl.maximum(match, 0.0) * w[None, :], 1)
            if SCALE is not None:
                score = score * tl.load(SCALE + at_key)
            tl.store(out + at, score, mask=at < ld)


@triton.jit(do_not_specialize=["pages", "k_kept"])
def _paged_queries(
    Q, W, K, SCALE, PAGE, VISIBLE, OUT, ld, q_stride, h_stride, k_stride, pages, k_kept,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, BS: tl.constexpr,
    SPAN: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The queries of one sequence, one after the other against each tile of its keys: a key is
    read once, however many drafts ask for it."""
    b = tl.program_id(0).to(tl.int64)
    seen = tl.load(VISIBLE + b * QUERIES)
    for j in tl.static_range(1, QUERIES):
        seen = tl.maximum(seen, tl.load(VISIBLE + b * QUERIES + j))
    begin = tl.program_id(1) * SPAN
    if (begin < seen) & (seen > k_kept):
        h, s, d = tl.arange(0, BH), tl.arange(0, BS), tl.arange(0, BD)
        held = (d < D)[None, :]
        q_at = Q + b * QUERIES * q_stride + h[:, None] * h_stride + d[None, :]
        q = tl.load(q_at, mask=(h < H)[:, None] & held, other=0.0)
        w = tl.load(W + b * QUERIES * H + h, mask=h < H, other=0.0)
        for step in range(0, SPAN, BS):
            at = begin + step + s
            key = tl.minimum(at, seen - 1)
            at_key = tl.load(PAGE + b * pages + key // SIZE).to(tl.int64) * SIZE + key % SIZE
            k_at = K + at_key[:, None] * k_stride + d[None, :]
            k = tl.load(k_at) if D == BD else tl.load(k_at, mask=held, other=0.0)
            for j in tl.static_range(QUERIES):
                if QUERIES > 1:
                    q = tl.load(q_at + j * q_stride, mask=(h < H)[:, None] & held, other=0.0)
                    w = tl.load(W + (b * QUERIES + j) * H + h, mask=h < H, other=0.0)
                match = tl.dot(k, tl.trans(q), input_precision=PRECISION)
                score = tl.sum(tl.maximum(match, 0.0) * w[None, :], 1)
                if SCALE is not None:
                    score = score * tl.load(SCALE + at_key)
                tl.store(OUT + (b * QUERIES + j) * ld + at, score, mask=at < ld)


def scores(
    query_THD: Tensor, keys: IndexKeys, weight_TH: Tensor, block: ScoreBlock, out: Tensor
) -> None:
    """Scores of the block's queries into `out`, a rectangle of the block's shape."""
    arguments, settings = _launch(query_THD, keys, weight_TH, out)
    where = (keys.slot_S, block.tile_N8, out, *arguments[4:])
    tiles = len(block.tile_N8)
    if block.few:
        grid = (tiles, triton.cdiv(block.width, FEW_SPAN))
        _few_queries[grid](*arguments[:4], *where, FIELDS=FIELDS, **_few(query_THD), **settings)
    else:
        steps = triton.cdiv(block.width, settings["BS"])
        tiled = {"BQ": MANY, "FIELDS": FIELDS, "GROUP": GROUP}
        _many_queries[(tiles * steps,)](*arguments[:4], *where, tiles, steps, **tiled, **settings)


def table_scores(
    query_NHD, keys: IndexKeys, weight_NH, pages: BlockTable, visible_BQ: Tensor, k: int, out
):
    """The same for a batch of sequences with equally many queries, their keys in pages; those of
    whom nobody sees more than `k` are left out.

    Asks nothing of the host: `visible_BQ` (int32) may change between replays of a graph.
    """
    arguments, settings = _launch(query_NHD, keys, weight_NH, out)
    (B, Q), page_BP = visible_BQ.shape, pages.page_BP
    assert visible_BQ.is_contiguous() and page_BP.stride(1) == 1
    where = (page_BP, visible_BQ, out, *arguments[4:], page_BP.stride(0), k)
    table = {"QUERIES": Q, "SIZE": pages.page_size}
    grid = (B, triton.cdiv(pages.max_keys, FEW_SPAN))
    _paged_queries[grid](*arguments[:4], *where, **table, **_few(query_NHD), **settings)


def _few(query_THD):
    return {"BH": max(16, triton.next_power_of_2(query_THD.shape[1])), "SPAN": FEW_SPAN}


def _launch(query_THD, keys, weight_TH, out):
    """What all forms are told: query, weight, key, scale; then how far apart their rows are."""
    (_, H, D), key_SD = query_THD.shape, keys.row_SD
    assert query_THD.stride(2) == key_SD.stride(1) == weight_TH.stride(1) == out.stride(1) == 1
    assert weight_TH.dtype == torch.float32 and weight_TH.stride(0) == H
    assert out.shape[1] % WIDTH == 0
    arguments = (
        query_THD, weight_TH, key_SD, keys.scale_S, out.stride(0),
        query_THD.stride(0), query_THD.stride(1), key_SD.stride(0),
    )  # fmt: skip
    settings = {
        "H": H,
        "D": D,
        "BD": max(32 if query_THD.dtype.itemsize == 1 else 16, triton.next_power_of_2(D)),
        # Without tensor cores, which keep too few bits of a float32, a smaller tile.
        "BS": 32 if query_THD.dtype == torch.float32 else WIDTH,
        "PRECISION": "ieee",
        "num_warps": WARPS,
        "num_stages": STAGES,
    }
    return arguments, settings
