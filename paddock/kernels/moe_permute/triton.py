"""Counting sort of routed rows, and their way there and back, a token at a time.

K experts of a token, E experts, D row width, BE and BD the powers of two that hold them.
"""

import triton
import triton.language as tl


@triton.jit
def _chosen(expert, block, T, K: tl.constexpr, BE: tl.constexpr, TOKENS: tl.constexpr):
    """[TOKENS, BE]: one where a token of this block goes to an expert."""
    t = block * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, BE)
    chosen = tl.zeros((TOKENS, BE), tl.int32)
    for k in range(K):
        name = tl.load(expert + t * K + k, mask=t < T, other=-1)
        chosen += (name[:, None] == e[None, :]).to(tl.int32)
    return chosen


@triton.jit
def count(
    expert, counts, T, BLOCKS,
    K: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """How many tokens of one block go to each expert."""
    block = tl.program_id(0)
    e = tl.arange(0, BE)
    found = tl.sum(_chosen(expert, block, T, K, BE, TOKENS), 0)
    tl.store(counts + e * BLOCKS + block, found.to(tl.int64), mask=e < E)


@triton.jit
def place(
    expert, start, slot, token, T, BLOCKS,
    K: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Where each row of one block goes, given where each expert's rows of it begin."""
    block = tl.program_id(0)
    e = tl.arange(0, BE)
    chosen = _chosen(expert, block, T, K, BE, TOKENS)
    first = tl.load(start + e * BLOCKS + block, mask=e < E, other=0)
    _put(expert, chosen, first, slot, token, block, T, K, BE, TOKENS)


@triton.jit
def sort(
    expert, counts, slot, token, T,
    K: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Both, of the only block there is."""
    e = tl.arange(0, BE)
    chosen = _chosen(expert, 0, T, K, BE, TOKENS)
    found = tl.sum(chosen, 0).to(tl.int64)
    tl.store(counts + e, found, mask=e < E)
    _put(expert, chosen, tl.cumsum(found, 0) - found, slot, token, 0, T, K, BE, TOKENS)


@triton.jit
def _put(
    expert, chosen, first, slot, token, block, T,
    K: tl.constexpr, BE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Rows of one block behind the first of each expert's, in the order of their tokens."""
    t = block * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, BE)
    place = first[None, :] + (tl.cumsum(chosen, 0) - chosen).to(tl.int64)
    for k in range(K):
        name = tl.load(expert + t * K + k, mask=t < T, other=-1)
        mine = tl.sum(tl.where(name[:, None] == e[None, :], place, 0), 1)
        tl.store(slot + t * K + k, mine, mask=t < T)
        tl.store(token + mine, t.to(tl.int64), mask=t < T)


@triton.jit
def spread(x, slot, out, x_row, K: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    row = tl.load(x + t * x_row + d, mask=d < D)
    for k in tl.static_range(K):
        to = tl.load(slot + t * K + k)
        tl.store(out + to * D + d, row, mask=d < D)


@triton.jit
def add_up(
    x, weight, slot, out, K: tl.constexpr, WEIGHTED: tl.constexpr, D: tl.constexpr, BD: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    total = tl.zeros((BD,), tl.float32)
    for k in tl.static_range(K):
        at = tl.load(slot + t * K + k)
        row = tl.load(x + at * D + d, mask=d < D, other=0.0).to(tl.float32)
        if WEIGHTED:
            row = row * tl.load(weight + t * K + k).to(tl.float32)
        total += row
    tl.store(out + t * D + d, total.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def gather_backward(
    grad, answer, weight, slot, danswer, dweight, g_row,
    K: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    g = tl.load(grad + t * g_row + d, mask=d < D, other=0.0).to(tl.float32)
    for k in tl.static_range(K):
        at = tl.load(slot + t * K + k)
        row = tl.load(answer + at * D + d, mask=d < D, other=0.0).to(tl.float32)
        w = tl.load(weight + t * K + k).to(tl.float32)
        tl.store(danswer + at * D + d, (g * w).to(danswer.dtype.element_ty), mask=d < D)
        tl.store(dweight + t * K + k, tl.sum(g * row, 0).to(dweight.dtype.element_ty))
