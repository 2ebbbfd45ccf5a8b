"""Sparse latent attention on Hopper, backward: a tile's probabilities again, then five products.

A program owns 64 rows of queries as in the forward pass (see `gluon.py`). Their gradient stays in
registers. The gradient of a tile of rows is formed a chunk of columns at a time and added to memory
straight from the registers the product leaves it in, while the next chunk is multiplied.

V value columns of a row, R the columns after them, C = V + R. M = 64 query rows, HP heads a query
is rounded up to, G = M / HP queries of a program, BK = 64 keys of a tile, U slots of a list, CHUNK
columns added at a time.
"""

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .gluon_tiles import (
    BK,
    LOG2_E,
    Lists,
    M,
    copy_layout,
    copy_queries,
    copy_rows,
    gather,
    kept_by,
    product_layout,
    query_rows,
    row_of,
    thread_barrier,
    tile_layout,
    write_rows,
)
from .problem import Attended, Problem, from_sums, row_sums
from .triton import deltas


@gluon.jit
def fetch_words(LIST, tile, tiles, words):
    """Start copying the words of a tile; past the last one, those of the last one again."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    start = gl.minimum(tile, gl.maximum(tiles, 1) - 1) * BK
    copy_rows(words, LIST + start + gl.arange(0, BK, layout))


@gluon.jit
def gather_tile(ROW, words, keys, rests, G: gl.constexpr):
    """Start copying the rows that `words` (in shared memory) name."""
    V: gl.constexpr = keys.shape[1]
    R: gl.constexpr = rests.shape[1]
    VL: gl.constexpr = copy_layout(V, gl.num_warps())
    RL: gl.constexpr = copy_layout(R, gl.num_warps())
    gather(ROW, words.load(gl.SliceLayout(1, VL)), keys, 0, V + R, G)
    gather(ROW, words.load(gl.SliceLayout(1, RL)), rests, V, V + R, G)


@gluon.jit
def places(
    DROW, words, C: gl.constexpr, layout: gl.constexpr, columns: gl.constexpr, G: gl.constexpr
):
    """Where the gradient of each row of a tile is summed, and whether it is anyone's."""
    row, named = row_of(words.load(gl.SliceLayout(1, layout)), G)
    column = gl.arange(0, columns, gl.SliceLayout(0, layout))
    at = DROW + gl.expand_dims(row * C, 1) + gl.expand_dims(column, 0)
    return at, gl.expand_dims(named, 1)


@gluon.jit
def add(at, x, unit, there):
    """Add to the sums of row gradients, as floats or counted in units."""
    if at.dtype.element_ty == gl.int64:
        gl.atomic_add(at, (x * unit).to(gl.int64), mask=there, sem="relaxed")
    else:
        gl.atomic_add(at, x, mask=there, sem="relaxed")


@gluon.jit
def start_chunk(chunk: gl.constexpr, dscores, probs, query_v, grad, zero):
    """Start multiplying a chunk of the row gradients: dS^T Q + P^T dO."""
    CHUNK: gl.constexpr = zero.shape[1]
    start: gl.constexpr = chunk * CHUNK
    side = query_v.slice(start, CHUNK, 1)
    z = warpgroup_mma(dscores.permute([1, 0]), side, zero, use_acc=False, is_async=True)
    return warpgroup_mma(probs.permute([1, 0]), grad.slice(start, CHUNK, 1), z, is_async=True)


# Longer than functions here may be: the order of products, copies and sums is the algorithm.
@gluon.jit
def backward_kernel(  # noqa: PLR0915
    QUERY, ROW, LISTS, COUNT, GRAD, LSE, DELTA, UNIT, DQUERY, DROW, scale, T, H, U,
    V: gl.constexpr, R: gl.constexpr, HP: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    G: gl.constexpr = M // HP
    C: gl.constexpr = V + R
    SL: gl.constexpr = product_layout(BK, 2)
    VL: gl.constexpr = product_layout(V, 2)
    RL: gl.constexpr = product_layout(R, 2)
    XL: gl.constexpr = product_layout(CHUNK, 2)
    blocks = (H + HP - 1) // HP
    program = gl.program_id(0)
    block = program % blocks
    group = (program // blocks).to(gl.int64)
    first = group * G
    LIST = LISTS + group * U
    dtype: gl.constexpr = QUERY.dtype.element_ty
    query_v = gl.allocate_shared_memory(dtype, [M, V], tile_layout(V))
    query_r = gl.allocate_shared_memory(dtype, [M, R], tile_layout(R))
    grad = gl.allocate_shared_memory(dtype, [M, V], tile_layout(V))
    keys = gl.allocate_shared_memory(dtype, [BK, V], tile_layout(V))
    rests = gl.allocate_shared_memory(dtype, [BK, R], tile_layout(R))
    probs = gl.allocate_shared_memory(dtype, [M, BK], tile_layout(BK))
    dscores = gl.allocate_shared_memory(dtype, [M, BK], tile_layout(BK))
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = gl.allocate_shared_memory(gl.int32, [4, BK], FLAT)
    tiles = (gl.load(COUNT + group) + BK - 1) // BK
    fetch_words(LIST, 0, tiles, words.index(0))
    fetch_words(LIST, 1, tiles, words.index(1))
    async_copy.commit_group()
    async_copy.wait_group(0)
    thread_barrier()
    copy_queries(QUERY, query_v, first, block, T, H, C, 0, HP)
    copy_queries(QUERY, query_r, first, block, T, H, C, V, HP)
    copy_queries(GRAD, grad, first, block, T, H, V, 0, HP)
    gather_tile(ROW, words.index(0), keys, rests, G)
    async_copy.commit_group()
    rows: gl.constexpr = gl.SliceLayout(1, SL)
    at, there = query_rows(first, block, T, H, HP, rows)
    # +inf for rows there are none of: their probabilities, and so all they add, are zero.
    lse = gl.expand_dims(gl.load(LSE + at, mask=there, other=float("inf")) * LOG2_E, 1)
    delta = gl.expand_dims(gl.load(DELTA + at, mask=there, other=0.0), 1)
    unit = gl.load(UNIT)
    row = gl.arange(0, M, gl.SliceLayout(1, SL))
    zero_s = gl.full([M, BK], 0.0, gl.float32, SL)
    zero_x = gl.full([BK, CHUNK], 0.0, gl.float32, XL)
    zero_r = gl.full([BK, R], 0.0, gl.float32, RL)
    dquery_v = gl.full([M, V], 0.0, gl.float32, VL)
    dquery_r = gl.full([M, R], 0.0, gl.float32, RL)
    for i in tl.range(0, tiles, disable_licm=True):  # hoisted operand addresses would be spilled
        word = words.index(i % 4)
        async_copy.wait_group(0)
        fence_async_shared()
        thread_barrier()
        s = warpgroup_mma(query_r, rests.permute([1, 0]), zero_s, use_acc=False, is_async=True)
        s = warpgroup_mma(query_v, keys.permute([1, 0]), s, is_async=True)
        dp = warpgroup_mma(grad, keys.permute([1, 0]), zero_s, use_acc=False, is_async=True)
        x = warpgroup_mma_wait(1, deps=[s])
        p = gl.exp2(x * (scale * LOG2_E) - lse)
        p = gl.where(kept_by(word.load(gl.SliceLayout(0, SL)), row, HP), p, 0.0)
        probs.store(p.to(dtype))
        y = warpgroup_mma_wait(0, deps=[dp])
        dscores.store((p * (y - delta) * scale).to(dtype))
        fence_async_shared()
        thread_barrier()
        a = warpgroup_mma(dscores, keys, dquery_v, is_async=True)
        c = warpgroup_mma(dscores, rests, dquery_r, is_async=True)
        # The first chunk of row gradients queues behind the queries' gradient; from then on one
        # chunk is multiplied while the one before is added.
        z = start_chunk(0, dscores, probs, query_v, grad, zero_x)
        target, named = places(DROW, word, C, XL, CHUNK, G)
        dquery_v, dquery_r = warpgroup_mma_wait(2, deps=[a, c])
        thread_barrier()  # both warpgroups are done with this tile of keys
        gather_tile(ROW, words.index((i + 1) % 4), keys, rests, G)
        fetch_words(LIST, i + 2, tiles, words.index((i + 2) % 4))
        async_copy.commit_group()
        for chunk in gl.static_range(1, V // CHUNK):
            z2 = start_chunk(chunk, dscores, probs, query_v, grad, zero_x)
            done = warpgroup_mma_wait(2, deps=[z])
            add(target + (chunk - 1) * CHUNK, done, unit, named)
            z = z2
        zr = warpgroup_mma(dscores.permute([1, 0]), query_r, zero_r, use_acc=False, is_async=True)
        done = warpgroup_mma_wait(1, deps=[z])
        add(target + (V - CHUNK), done, unit, named)
        target_r, named_r = places(DROW + V, word, C, RL, R, G)
        done_r = warpgroup_mma_wait(0, deps=[zr])
        add(target_r, done_r, unit, named_r)
    async_copy.wait_group(0)
    write_rows(DQUERY, dquery_v, first, block, T, H, C, 0, HP)
    write_rows(DQUERY, dquery_r, first, block, T, H, C, V, HP)


def backward(
    problem: Problem,
    attended: Attended,
    grad_THV: Tensor,
    *,
    deterministic: bool,
    united: bool = True,
    chunk: int = 128,
) -> tuple[Tensor, Tensor]:
    """Gradients of queries and rows. The first is always the same; the second if asked."""
    query_THC, V = problem.query_THC, problem.value
    T, H, _ = query_THC.shape
    lists = Lists.of(problem, united=united)
    dquery_THC = torch.empty_like(query_THC)
    sum_SC, unit = row_sums(problem, grad_THV, fixed=deterministic)
    backward_kernel[(lists.programs(problem),)](
        query_THC,
        problem.row_SC,
        lists.word_NU,
        lists.count_N,
        grad_THV,
        attended.lse_TH,
        deltas(attended.out_THV, grad_THV),
        unit,
        dquery_THC,
        sum_SC,
        problem.scale,
        T,
        H,
        lists.word_NU.shape[1],
        V=V,
        R=problem.rest,
        HP=lists.heads,
        # Whole numbers take two registers each.
        CHUNK=min(chunk, V, 64 if deterministic else V),
        num_warps=8,
    )
    return dquery_THC, from_sums(sum_SC, unit, problem.row_SC.dtype)
