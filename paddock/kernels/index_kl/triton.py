"""The indexer's loss by the tensor cores, in a bounded piece of scratch memory.

For a block of queries, one rectangle each (a row per query, a column per key it may look at):
targets (two walks over the rows: sums of exponentials, then probabilities, averaged over heads in
registers), scores (see index_scores), and softmax(score) - target, which is the gradient of a
score. From that, the gradients of the indexer's tensors: products are computed once more rather
than kept.

H teacher heads, C row width, G index heads, D index dim, K kept. A tile of the target has BS keys
and BQ queries x HP heads; BC columns of a row are multiplied at a time. HP, BG and BD are powers of
two that hold H, G and D.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paddock.kernels.index_scores.blocks import FIELDS, MANY, WIDTH, ScoreBlock
from paddock.kernels.sparse_mla.triton import add_rows, padded

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# A running maximum must be finite: -inf minus -inf is no number.
LOWEST = tl.constexpr(-1e30)
COLUMNS = 64  # of a row multiplied at a time
LOSS_COLUMNS = 1024
HEADS_TOGETHER = 2  # index heads of the queries' gradient that share a tile of keys
SHARES = 4  # programs that share the heads of a tile of keys, each with a sum of its own


@triton.jit
def _keys_at(INDEX, key, s, end):
    """Where keys `s` of a query stand; from the last one on, the last one."""
    s = tl.minimum(s, end - 1)
    return key + s if INDEX is None else tl.maximum(tl.load(INDEX + s), 0)


@triton.jit
def _load(at, column, width: tl.constexpr, padded: tl.constexpr):
    """Rows at `at` [N]: columns `column` of them. A mask only where one is due."""
    at = at[:, None] + column[None, :]
    if width % padded == 0:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=(column < width)[None, :], other=0.0)
    return x


@triton.jit
def _operands(
    i, query_at, ROW, INDEX, key, end, r_stride,
    C: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Step i of a walk over tiles of keys: some columns of a tile, and of the queries."""
    steps: tl.constexpr = (C + BC - 1) // BC
    at_key = _keys_at(INDEX, key, i // steps * BS + tl.arange(0, BS), end)
    column = i % steps * BC + tl.arange(0, BC)
    row = _load(ROW + at_key.to(tl.int64) * r_stride, column, C, BC)
    return row, _load(query_at, column, C, BC)


@triton.jit
def _among(s, INDEX, end):
    """Whether keys `s` are there, or kept."""
    there = s < end
    if INDEX is not None:
        there &= tl.load(INDEX + s, mask=there, other=-1) >= 0
    return there


@triton.jit
def _log_sums(
    query_at, seen_M, ROW, INDEX, scale, key, seen, end, r_stride,
    C: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """[M] logarithms, to base 2, of sums of exponentials over keys; +inf where there is no key.

    Keys are columns here, so that a sum over them stays within few threads.
    """
    steps: tl.constexpr = (C + BC - 1) // BC
    top = tl.full([M], LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BS], tl.float32)
    # Tiles that all of the queries see whole need no mask.
    whole = (seen // BS if INDEX is None else 0) * steps
    for masked in tl.static_range(0 if INDEX is None else 1, 2):
        # Keys and columns in one loop: the next tile is on its way while this one is summed.
        for i in range(whole if masked else 0, tl.cdiv(end, BS) * steps if masked else whole):
            row, query = _operands(i, query_at, ROW, INDEX, key, end, r_stride, C, BC, BS)
            acc = tl.dot(query, tl.trans(row), acc, input_precision="ieee")
            if i % steps == steps - 1:
                if masked:
                    s = i // steps * BS + tl.arange(0, BS)
                    kept = _among(s, INDEX, end)[None, :]
                    if INDEX is None:
                        kept &= s[None, :] < seen_M[:, None]
                    acc = tl.where(kept, acc, float("-inf"))
                higher = tl.maximum(top, tl.max(acc, 1) * scale)
                prob = tl.exp2(acc * scale - higher[:, None])
                total = total * tl.exp2(top - higher) + tl.sum(prob, 1)
                top = higher
                acc = tl.zeros([M, BS], tl.float32)
    return tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("inf"))


@triton.jit
def _mean_attention(
    QUERY, ROW, INDEX, OUT, scale, count, key, seen, end, ld, q_stride, h_stride, r_stride,
    H: tl.constexpr, C: tl.constexpr, HP: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """OUT[j, s] for queries j < count: the heads' mean probability of key s. The first query sees
    `seen` keys and each next one more; or all see those of INDEX. `end` is where keys end."""
    steps: tl.constexpr = (C + BC - 1) // BC
    m, j = tl.arange(0, BQ * HP), tl.arange(0, BQ)
    query_m, head = m // HP, m % HP
    at = tl.minimum(query_m, count - 1).to(tl.int64) * q_stride
    query_at = QUERY + at + tl.minimum(head, H - 1).to(tl.int64) * h_stride
    seen_M = seen + query_m
    scale *= LOG2_E
    lse = _log_sums(
        query_at, seen_M, ROW, INDEX, scale, key, seen, end, r_stride, C, BC, BS, BQ * HP
    )
    # Heads there are none of have no part in the mean.
    lse = tl.where(head < H, lse, float("inf"))
    acc = tl.zeros([BS, BQ * HP], tl.float32)
    for i in range(0, tl.cdiv(end, BS) * steps):
        row, query = _operands(i, query_at, ROW, INDEX, key, end, r_stride, C, BC, BS)
        acc = tl.dot(row, tl.trans(query), acc, input_precision="ieee")
        if i % steps == steps - 1:
            s = i // steps * BS + tl.arange(0, BS)
            # Beyond what a query sees there are no numbers here, and nobody looks for any.
            prob = tl.reshape(tl.exp2(acc * scale - lse[None, :]), [BS, BQ, HP])
            inside = (s < ld)[:, None] & (j < count)[None, :]
            out = OUT + j.to(tl.int64)[None, :] * ld + s[:, None]
            tl.store(out, tl.sum(prob, 2) / H, mask=inside)
            acc = tl.zeros([BS, BQ * HP], tl.float32)


@triton.jit(do_not_specialize=["tiles"])
def dense_target_kernel(
    QUERY, ROW, TILE, OUT, scale, tiles, ld, q_stride, h_stride, r_stride,
    H: tl.constexpr, C: tl.constexpr, HP: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr,
    BC: tl.constexpr, PARTS: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """A tile of neighbouring queries in PARTS of BQ; the longest rows go first."""
    tile = TILE + (tiles - 1 - tl.program_id(0) // PARTS) * FIELDS
    first = tl.program_id(0) % PARTS * BQ
    query, queries, key = tl.load(tile) + first, tl.load(tile + 1), tl.load(tile + 2)
    seen, row = tl.load(tile + 3) - queries + first + 1, tl.load(tile + 4) + first
    count = queries - first
    if count > 0:
        _mean_attention(
            QUERY + query.to(tl.int64) * q_stride, ROW, None, OUT + row.to(tl.int64) * ld, scale,
            count, key, seen, seen - 1 + tl.minimum(count, BQ), ld, q_stride, h_stride, r_stride,
            H, C, HP, BQ, BS, BC,
        )  # fmt: skip


@triton.jit(do_not_specialize=["K"])
def kept_target_kernel(
    QUERY, ROW, INDEX, OUT, scale, K, ld, q_stride, h_stride, r_stride,
    H: tl.constexpr, C: tl.constexpr, HP: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One query, its rows gathered."""
    t = tl.program_id(0).to(tl.int64)
    _mean_attention(
        QUERY + t * q_stride, ROW, INDEX + t * K, OUT + t * ld, scale, 1, 0, 0, K, ld,
        q_stride, h_stride, r_stride, H, C, HP, 1, BS, BC,
    )  # fmt: skip


@triton.jit(do_not_specialize=["K"])
def loss_kernel(
    SCORE, TARGET, INDEX, VISIBLE, LOSS, GRAD, K, ld, TAIL: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """LOSS[t] = KL(target || softmax(score)) and GRAD[t, s] = softmax(score) - target, zeros where
    t may not look, up to the end of the last tile of keys that a neighbour (TAIL) may look at."""
    t = tl.program_id(0).to(tl.int64)
    SCORE, TARGET = SCORE + t * ld, TARGET + t * ld
    end = K if VISIBLE is None else tl.load(VISIBLE + t)
    INDEX = None if INDEX is None else INDEX + t * K
    top = tl.full([B], LOWEST, tl.float32)
    total = tl.zeros([B], tl.float32)
    for start in range(0, end, B):
        s = start + tl.arange(0, B)
        seen = _among(s, INDEX, end)
        score = tl.load(SCORE + s, mask=seen, other=float("-inf")) * LOG2_E
        higher = tl.maximum(top, score)
        total = total * tl.exp2(top - higher) + tl.exp2(score - higher)
        top = higher
    highest = tl.max(top, 0)
    total = tl.sum(total * tl.exp2(top - highest), 0)
    lse = highest + tl.log2(tl.where(total > 0, total, 1.0))
    loss = tl.zeros([B], tl.float32)
    for start in range(0, tl.minimum(end + TAIL, ld), B):
        s = start + tl.arange(0, B)
        seen = _among(s, INDEX, end)
        score = tl.load(SCORE + s, mask=seen, other=float("-inf")) * LOG2_E
        target = tl.load(TARGET + s, mask=seen, other=0.0)
        some = target > 0
        ratio = tl.log2(tl.where(some, target, 1.0)) - (score - lse)
        loss += tl.where(some, target * ratio, 0.0)
        if GRAD is not None:
            grad = (tl.exp2(score - lse) - target).to(GRAD.dtype.element_ty)
            tl.store(GRAD + t * ld + s, grad, mask=s < ld)
    tl.store(LOSS + t, tl.sum(loss, 0) * LN_2)


@triton.jit(do_not_specialize=["tiles"])
def query_gradient_kernel(
    QUERY, KEY, WEIGHT, GRAD, TILE, DQUERY, DWEIGHT, tiles, ld,
    G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, BQ: tl.constexpr,
    BS: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Of BH heads of a tile of queries, over all their keys."""
    tile = TILE + (tiles - 1 - tl.program_id(0)) * FIELDS
    query, count, key = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    end, row = tl.load(tile + 3), tl.load(tile + 4)
    m, d = tl.arange(0, BH * BQ), tl.arange(0, BD)
    j, head = m % BQ, tl.program_id(1) * BH + m // BQ
    mine = (j < count) & (head < G)
    at = (query + tl.minimum(j, count - 1)).to(tl.int64) * G + tl.minimum(head, G - 1)
    q = _load(QUERY + at * D, d, D, BD)
    grad_at = GRAD + (row + tl.minimum(j, count - 1)).to(tl.int64) * ld
    acc = tl.zeros([BH * BQ, BD], tl.float32)
    dweight = tl.zeros([BH * BQ], tl.float32)
    for start in range(0, end, BS):
        s = start + tl.arange(0, BS)
        k = _load(KEY + _keys_at(None, key, s, end).to(tl.int64) * D, d, D, BD)
        grad = tl.load(grad_at[:, None] + s[None, :])
        match = tl.dot(q, tl.trans(k), input_precision="ieee")
        dweight += tl.sum(grad.to(tl.float32) * tl.maximum(match, 0.0), 1)
        live = tl.where(match > 0, grad, 0.0).to(grad.dtype)
        acc = tl.dot(live, k.to(grad.dtype), acc, input_precision="ieee")
    # The weight is the same for all keys: it comes last, and is not rounded.
    acc *= tl.load(WEIGHT + at)[:, None]
    held = mine[:, None] & (d < D)[None, :]
    tl.store(DQUERY + at[:, None] * D + d[None, :], acc.to(DQUERY.dtype.element_ty), mask=held)
    tl.store(DWEIGHT + at, dweight, mask=mine)


@triton.jit
def key_gradient_kernel(
    QUERY, KEY, WEIGHT, GRAD, TILE, KEY_TILE, DKEY, ld, share_stride,
    G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PART: tl.constexpr, BQ: tl.constexpr,
    BS: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Of a tile of keys, by PART of the heads, over all queries that see one of them."""
    mine = KEY_TILE + tl.program_id(0) * FIELDS
    key, keys, column = tl.load(mine), tl.load(mine + 1), tl.load(mine + 2)
    j, s, d = tl.arange(0, BQ), tl.arange(0, BS), tl.arange(0, BD)
    k_at = (key + tl.minimum(s, keys - 1)).to(tl.int64)
    k = _load(KEY + k_at * D, d, D, BD)
    acc = tl.zeros([BS, BD], tl.float32)
    head = tl.program_id(1) * PART
    for n in range(tl.load(mine + 3), tl.load(mine + 4)):
        tile = TILE + n * FIELDS
        query, count, row = tl.load(tile), tl.load(tile + 1), tl.load(tile + 4)
        grad_at = GRAD + (row + j).to(tl.int64)[None, :] * ld + (column + s)[:, None]
        grad = tl.load(grad_at, mask=(j < count)[None, :], other=0.0)
        at = (query + tl.minimum(j, count - 1)).to(tl.int64) * G
        for h in range(head, tl.minimum(head + PART, G)):
            q = _load(QUERY + (at + h) * D, d, D, BD)
            weight = tl.load(WEIGHT + at + h)
            match = tl.dot(k, tl.trans(q), input_precision="ieee")
            live = tl.where(match > 0, grad * weight[None, :], 0.0).to(grad.dtype)
            acc = tl.dot(live, q.to(grad.dtype), acc, input_precision="ieee")
    out = DKEY + tl.program_id(1) * share_stride + k_at[:, None] * D + d[None, :]
    # Documents may share keys; where they do not, each sum has one summand and one result.
    tl.atomic_add(out, acc, mask=(s < keys)[:, None] & (d < D)[None, :], sem="relaxed")


@triton.jit(do_not_specialize=["K"])
def kept_gradient_kernel(
    QUERY, KEY, WEIGHT, GRAD, INDEX, UNIT, DQUERY, DWEIGHT, DKEY, K, ld,
    G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """One query and its kept keys: a gathered key meets all heads, and all gradients, at once."""
    t = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, BG), tl.arange(0, BD)
    at = t * G + tl.minimum(h, G - 1)
    q = _load(QUERY + at * D, d, D, BD)
    weight = tl.where(h < G, tl.load(WEIGHT + at), 0.0)
    unit = tl.load(UNIT)
    # Columns of keys are the rows of this one, so that few heads still fill a product.
    acc = tl.zeros([BD, BG], tl.float32)
    dweight = tl.zeros([BG], tl.float32)
    for start in range(0, K, BS):
        s = start + tl.arange(0, BS)
        index = tl.load(INDEX + t * K + s, mask=s < K, other=-1)
        kept = index >= 0
        offset = tl.maximum(index, 0).to(tl.int64) * D
        k = _load(KEY + offset, d, D, BD)
        grad = tl.load(GRAD + t * ld + s, mask=kept, other=0.0)
        match = tl.dot(k, tl.trans(q), input_precision="ieee")
        dweight += tl.sum(grad.to(tl.float32)[:, None] * tl.maximum(match, 0.0), 0)
        live = tl.where(match > 0, grad[:, None], 0.0).to(grad.dtype)
        acc = tl.dot(tl.trans(k.to(grad.dtype)), live, acc, input_precision="ieee")
        weighted = (live * weight[None, :]).to(grad.dtype)
        dkey = tl.dot(weighted, q.to(grad.dtype), input_precision="ieee")
        inside = kept[:, None] & (d < D)[None, :]
        add_rows(DKEY + offset[:, None] + d[None, :], dkey, unit, inside)
    held = (d < D)[:, None] & (h < G)[None, :]
    acc = (acc * weight[None, :]).to(DQUERY.dtype.element_ty)
    tl.store(DQUERY + at[None, :] * D + d[:, None], acc, mask=held)
    tl.store(DWEIGHT + at, dweight, mask=h < G)


@dataclass(frozen=True, slots=True)
class TargetTile:
    """How much of the target one program holds at a time: keys, and queries x heads."""

    keys: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None  # at most, so that two programs fit beside one another


# The fastest of those tried at 8K on an H200 (dense 532, kept 335 TFLOP/s; benchmarks.kernels kl).
DENSE, KEPT = TargetTile(128, 128, 8, 3, registers=128), TargetTile(256, 64, 8, 4)


def dense_target(attention, block: ScoreBlock, out: Tensor, tile: TargetTile = DENSE) -> None:
    """Where the heads look on average, into a rectangle of the block's shape."""
    HP, tiles = max(2, triton.next_power_of_2(attention.query_THC.shape[1])), len(block.tile_N8)
    BQ = min(max(tile.columns // HP, 1), MANY)
    parts = 1 if block.few else MANY // BQ
    dense_target_kernel[(tiles * parts,)](
        attention.query_THC, attention.row_SC, block.tile_N8, out, attention.scale, tiles,
        *_strides(attention, out), BQ=BQ, HP=HP, PARTS=parts, FIELDS=FIELDS,
        **_settings(attention, tile),
    )  # fmt: skip


def kept_target(attention, index_QK: Tensor, out: Tensor, tile: TargetTile = KEPT) -> None:
    """The same over kept rows."""
    Q, K = index_QK.shape
    kept_target_kernel[(Q,)](
        attention.query_THC, attention.row_SC, index_QK, out, attention.scale, K,
        *_strides(attention, out), HP=padded(attention.query_THC.shape[1]),
        **_settings(attention, tile),
    )  # fmt: skip


def _strides(attention, out: Tensor) -> tuple[int, int, int, int]:
    query_THC, row_SC = attention.query_THC, attention.row_SC
    assert query_THC.stride(2) == row_SC.stride(1) == out.stride(1) == 1
    return out.stride(0), query_THC.stride(0), query_THC.stride(1), row_SC.stride(0)


def _settings(attention, tile: TargetTile) -> dict[str, int | None]:
    shape = {"H": attention.query_THC.shape[1], "C": attention.query_THC.shape[2]}
    tiled = {"BS": tile.keys, "BC": COLUMNS, "maxnreg": tile.registers}
    return shape | tiled | {"num_warps": tile.warps, "num_stages": tile.stages}


def losses(score: Tensor, target: Tensor, grad: Tensor | None, seen: Tensor) -> Tensor:
    """[Q] losses of rectangles, and the gradient of every score; `seen` is how many keys each row
    sees [Q], or which ones it keeps [Q, K]."""
    Q, ld = score.shape
    dense = seen.dim() == 1
    index, visible, K = (None, seen, 0) if dense else (seen, None, seen.shape[1])
    loss_Q = torch.empty(Q, dtype=torch.float32, device=score.device)
    # A tile of queries is read as wide as its last one sees, and that to a whole tile of keys.
    tail = MANY + WIDTH - 2 if dense else 0
    loss_kernel[(Q,)](
        score, target, index, visible, loss_Q, grad, K, ld, TAIL=tail, B=LOSS_COLUMNS, num_warps=8
    )
    return loss_Q


def dense_gradients(index, grad: Tensor, block: ScoreBlock, key_tile_N8: Tensor, out) -> None:
    """Of a block's queries and weights, stored; of the keys, added to sums [SHARES, S, D]."""
    G, D = index.query_THD.shape[1:]
    sides, ld, tiles = (*index, grad), grad.stride(0), len(block.tile_N8)
    shape = {"G": G, "D": D, "BD": padded(D), "BQ": MANY, "FIELDS": FIELDS, "num_warps": 8}
    BH = min(HEADS_TOGETHER, G)
    query_gradient_kernel[(tiles, triton.cdiv(G, BH))](
        *sides, block.tile_N8, out.query_THD, out.weight_TH, tiles, ld,
        BH=BH, BS=64, num_stages=3, **shape,
    )  # fmt: skip
    key_gradient_kernel[(len(key_tile_N8), SHARES)](
        *sides, block.tile_N8, key_tile_N8, out.key_SD, ld, out.key_SD.stride(0),
        PART=triton.cdiv(G, SHARES), BS=WIDTH, num_stages=2, **shape,
    )  # fmt: skip


def kept_gradients(index, grad: Tensor, index_QK: Tensor, unit: Tensor, out) -> None:
    """Of a chunk's queries and weights, stored; of the keys, added to sums [S, D] in units."""
    (Q, G, D), K = index.query_THD.shape, index_QK.shape[1]
    kept_gradient_kernel[(Q,)](
        *index, grad, index_QK, unit, out.query_THD, out.weight_TH, out.key_SD, K, grad.stride(0),
        G=G, D=D, BD=padded(D), BG=padded(G), BS=64, num_warps=4, num_stages=2,
    )  # fmt: skip
