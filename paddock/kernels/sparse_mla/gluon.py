"""Sparse latent attention on Hopper, forward: some warps gather, the others multiply.

Four warps copy the rows a program's list names into shared memory, 64 at a time; eight warps
multiply. A row is copied once and serves as key and as value. Of the two warpgroups that multiply
each scores its own 64 keys and hands the probabilities over; each adds up half of the value columns
for all keys. One's softmax runs under the other's products. (Both on the same keys, half each, with
one softmax for both: 388 instead of 474 TFLOP/s.)

V value columns of a row, R the columns after them. M = 64 query rows, HP heads a query is rounded
up to, G = M / HP queries of a program, BK = 64 keys of a tile, U slots of a list.
"""

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .gluon_tiles import (
    BK,
    LOG2_E,
    MARGIN_BYTES,
    SHARED_BYTES,
    TILE,
    Lists,
    M,
    copy_layout,
    copy_queries,
    copy_rows,
    gather,
    kept_by,
    product_layout,
    query_rows,
    thread_barrier,
    tile_layout,
    write_rows,
)
from .problem import Attended, Problem

LN_2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-1e30)  # a running maximum must be finite: -inf minus -inf is no number
# Registers of a thread when the three warpgroups of a program have the same number.
EVEN_SHARE = gl.constexpr(168)


@gluon.jit
def gather_tiles(ROW, LIST, tiles, limit, keys, rests, words, full, empty, G: gl.constexpr):
    """The copying warps: fill each tile as soon as it is free."""
    V: gl.constexpr = keys.shape[2]
    R: gl.constexpr = rests.shape[2]
    STAGES: gl.constexpr = keys.shape[0]
    VL: gl.constexpr = copy_layout(V, gl.num_warps())
    RL: gl.constexpr = copy_layout(R, gl.num_warps())
    WL: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot_v = gl.arange(0, 16, gl.SliceLayout(1, VL))
    slot_r = gl.arange(0, BK, gl.SliceLayout(1, RL))
    slot_w = gl.arange(0, BK, WL)
    # The words of the coming tile wait in registers, so that a freed tile is refilled at once.
    word0 = gl.load(LIST + slot_v)
    word1 = gl.load(LIST + 16 + slot_v)
    word2 = gl.load(LIST + 32 + slot_v)
    word3 = gl.load(LIST + 48 + slot_v)
    word_r = gl.load(LIST + slot_r)
    for i in range(tiles):
        b = i % STAGES
        mbarrier.wait(empty.index(b), ((i // STAGES) & 1) ^ 1)
        tile = keys.index(b)
        gather(ROW, word0, tile.slice(0, 16, 0), 0, V + R, G)
        gather(ROW, word1, tile.slice(16, 16, 0), 0, V + R, G)
        gather(ROW, word2, tile.slice(32, 16, 0), 0, V + R, G)
        gather(ROW, word3, tile.slice(48, 16, 0), 0, V + R, G)
        gather(ROW, word_r, rests.index(b), V, V + R, G)
        copy_rows(words.index(b), LIST + i * BK + slot_w)
        async_copy.mbarrier_arrive(full.index(b), increment_count=False)
        ahead = gl.minimum((i + 1) * BK, limit)
        word0 = gl.load(LIST + ahead + slot_v)
        word1 = gl.load(LIST + ahead + 16 + slot_v)
        word2 = gl.load(LIST + ahead + 32 + slot_v)
        word3 = gl.load(LIST + ahead + 48 + slot_v)
        word_r = gl.load(LIST + ahead + slot_r)
    async_copy.wait_group(0)


@gluon.jit
def write_lse(LSE, top, total, first, block, T, H, HP: gl.constexpr):
    """Log-sum-exp to memory, and what to divide the outputs by."""
    layout: gl.constexpr = top.type.layout
    at, there = query_rows(first, block, T, H, HP, layout)
    none = total == 0
    total = gl.where(none, 1.0, total)
    lse = gl.where(none, float("inf"), top * LN_2 + gl.log(total))
    gl.store(LSE + at, lse, mask=there)
    return total


@gluon.jit
def per_row(x, acc):
    """A value a row, as the rows of `acc` lie in registers."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, acc.type.layout)), 1)


@gluon.jit
def score(i, query_v, query_r, keys, rests, full):
    """Scores of tile `i` [M, BK], once it has landed."""
    STAGES: gl.constexpr = keys.shape[0]
    SL: gl.constexpr = product_layout(BK, 1)
    b = i % STAGES
    mbarrier.wait(full.index(b), (i // STAGES) & 1)
    fence_async_shared()
    zero = gl.full([M, BK], 0.0, gl.float32, SL)
    s = warpgroup_mma(query_r, rests.index(b).permute([1, 0]), zero, use_acc=False, is_async=True)
    s = warpgroup_mma(query_v, keys.index(b).permute([1, 0]), s, is_async=True)
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def add_values(i, acc, keys, probs, empty, W: gl.constexpr):
    """Add this warpgroup's half of the value columns of tile `i`, and give the tile back."""
    STAGES: gl.constexpr = keys.shape[0]
    HALF: gl.constexpr = keys.shape[2] // 2
    b = i % STAGES
    a = warpgroup_mma(probs, keys.index(b).slice(W * HALF, HALF, 1), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[a])
    thread_barrier()
    mbarrier.arrive(empty.index(b), count=1)
    return acc


@gluon.jit
def own_tile(
    i, x, whole, top, total, acc, unit, keys, words, probs, tops, empty, ready, spent,
    HP: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Softmax of the scores `x` of tile `i`, published for the other warpgroup, then its values."""
    row = gl.arange(0, M, top.type.layout)
    if (i + 1) * BK > whole:  # in front of that every query keeps every slot
        word = words.index(i % keys.shape[0]).load(gl.SliceLayout(0, x.type.layout))
        x = gl.where(kept_by(word, row, HP), x, float("-inf"))
    higher = gl.maximum(top, gl.max(x, 1) * unit)
    shrink = gl.exp2(top - higher)
    p = gl.exp2(x * unit - gl.expand_dims(higher, 1))
    total = total * shrink + gl.sum(p, 1)
    acc = acc * per_row(shrink, acc)
    # The other warpgroup has added the values of its tile before this one; so have we.
    mbarrier.wait(spent.index(1 - W), ((i - 1) // 2) & 1, pred=i > 0)
    probs.store(p.to(probs.dtype))
    tops.index(W).store(higher)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(ready.index(W), count=1)
    acc = add_values(i, acc, keys, probs, empty, W)
    mbarrier.arrive(spent.index(W), count=1)
    return higher, total, acc


@gluon.jit
def others_tile(
    i, top, total, acc, keys, probs, tops, full, empty, ready, W: gl.constexpr
):  # fmt: skip
    """Values of a tile that the other warpgroup has scored."""
    STAGES: gl.constexpr = keys.shape[0]
    mbarrier.wait(full.index(i % STAGES), (i // STAGES) & 1)
    mbarrier.wait(ready.index(1 - W), (i // 2) & 1)
    fence_async_shared()
    higher = tops.index(1 - W).load(top.type.layout)
    shrink = gl.exp2(top - higher)
    acc = add_values(i, acc * per_row(shrink, acc), keys, probs, empty, W)
    return higher, total * shrink, acc


@gluon.jit
def multiply_half(
    OUT, LSE, first, block, T, H, tiles, whole, scale,
    query_v, query_r, keys, rests, words, probs, tops, asked, full, empty, ready, spent, ends,
    HP: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """One warpgroup of a pair: the first scores even tiles, the second odd ones."""
    V: gl.constexpr = keys.shape[2]
    SL: gl.constexpr = product_layout(BK, 1)
    OL: gl.constexpr = product_layout(V // 2, 1)
    top = gl.full([M], LOWEST, gl.float32, gl.SliceLayout(1, SL))
    total = gl.full([M], 0.0, gl.float32, gl.SliceLayout(1, SL))
    acc = gl.full([M, V // 2], 0.0, gl.float32, OL)
    unit = scale * LOG2_E
    mbarrier.wait(asked.index(0), 0)
    for i in tl.range(W, tiles, 2, disable_licm=True):
        x = score(i, query_v, query_r, keys, rests, full)
        if W == 1:
            top, total, acc = others_tile(
                i - 1, top, total, acc, keys, probs, tops, full, empty, ready, W
            )
        top, total, acc = own_tile(
            i, x, whole, top, total, acc, unit, keys, words, probs, tops, empty, ready, spent,
            HP, W,
        )  # fmt: skip
        if W == 0:
            top, total, acc = others_tile(
                i + 1, top, total, acc, keys, probs, tops, full, empty, ready, W
            )
    # Both know the highest score by now; each has summed its own tiles.
    tops.index(2 + W).store(total)
    thread_barrier()
    mbarrier.arrive(ends.index(W), count=1)
    mbarrier.wait(ends.index(1 - W), 0)
    total = total + tops.index(3 - W).load(top.type.layout)
    if W == 0:
        total = write_lse(LSE, top, total, first, block, T, H, HP)
    else:
        total = gl.where(total == 0, 1.0, total)
    write_rows(OUT, acc / per_row(total, acc), first, block, T, H, V, W * (V // 2), HP)


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """So many, each of which opens when so many have arrived."""
    made = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(made.index(i), count=arrivals)
    return made


@gluon.jit
def forward_kernel(
    QUERY, ROW, LISTS, COUNT, WHOLE, OUT, LSE, scale, T, H, U,
    V: gl.constexpr, R: gl.constexpr, HP: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    G: gl.constexpr = M // HP
    blocks = (H + HP - 1) // HP
    program = gl.program_id(0)
    block = program % blocks
    group = (program // blocks).to(gl.int64)
    first = group * G
    count = gl.load(COUNT + group)  # on their way while the rest is set up
    whole = gl.load(WHOLE + group)
    dtype: gl.constexpr = QUERY.dtype.element_ty
    query_v = gl.allocate_shared_memory(dtype, [M, V], tile_layout(V))
    query_r = gl.allocate_shared_memory(dtype, [M, R], tile_layout(R))
    keys = gl.allocate_shared_memory(dtype, [STAGES, BK, V], tile_layout(V))
    rests = gl.allocate_shared_memory(dtype, [STAGES, BK, R], tile_layout(R))
    probs = gl.allocate_shared_memory(dtype, [M, BK], tile_layout(BK))
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = gl.allocate_shared_memory(gl.int32, [STAGES, BK], FLAT)
    tops = gl.allocate_shared_memory(gl.float32, [4, M], FLAT)
    # Every copying thread arrives once its copies have landed.
    asked = barriers(1, 32 * gl.num_warps())
    full = barriers(STAGES, 128)
    empty = barriers(STAGES, 2)
    ready = barriers(2, 1)
    spent = barriers(2, 1)
    ends = barriers(2, 1)
    thread_barrier()
    # Queries arrive while the first keys are gathered.
    copy_queries(QUERY, query_v, first, block, T, H, V + R, 0, HP)
    copy_queries(QUERY, query_r, first, block, T, H, V + R, V, HP)
    async_copy.mbarrier_arrive(asked.index(0), increment_count=False)
    WORKER: gl.constexpr = (3 * EVEN_SHARE - REGISTERS) // 16 * 8
    tiles = (count + 2 * BK - 1) // (2 * BK) * 2
    LIST = LISTS + group * U
    # Written out: a tuple that is named or added to loses its constants.
    gl.warp_specialize(
        [
            (multiply_half, (
                OUT, LSE, first, block, T, H, tiles, whole, scale, query_v, query_r, keys,
                rests, words, probs, tops, asked, full, empty, ready, spent, ends, HP, 0,
            )),
            (multiply_half, (
                OUT, LSE, first, block, T, H, tiles, whole, scale, query_v, query_r, keys,
                rests, words, probs, tops, asked, full, empty, ready, spent, ends, HP, 1,
            )),
            (gather_tiles, (ROW, LIST, tiles, U - BK, keys, rests, words, full, empty, G)),
        ],
        [4, 4],
        [WORKER, REGISTERS],
    )  # fmt: skip


def stages(problem: Problem) -> int:
    """Tiles of keys that fit beside the queries and the probabilities."""
    tile = TILE * problem.row_SC.shape[1] * 2
    room = SHARED_BYTES - MARGIN_BYTES - tile - TILE * TILE * 2
    return 4 if 4 * tile <= room else room // tile


def forward(problem: Problem, *, united: bool = True, registers: int = 56) -> Attended:
    """Output and log-sum-exp of every query; tensors contiguous, halves.

    `registers` are those of a copying thread.
    """
    query_THC, V = problem.query_THC, problem.value
    T, H, _ = query_THC.shape
    lists = Lists.of(problem, united=united)
    out_THV = query_THC.new_empty(T, H, V)
    lse_TH = torch.empty(T, H, dtype=torch.float32, device=query_THC.device)
    forward_kernel[(lists.programs(problem),)](
        query_THC,
        problem.row_SC,
        lists.word_NU,
        lists.count_N,
        lists.whole_N,
        out_THV,
        lse_TH,
        problem.scale,
        T,
        H,
        lists.word_NU.shape[1],
        V=V,
        R=problem.rest,
        HP=lists.heads,
        STAGES=stages(problem),
        REGISTERS=registers,
        num_warps=4,
    )
    return Attended(out_THV, lse_TH)
