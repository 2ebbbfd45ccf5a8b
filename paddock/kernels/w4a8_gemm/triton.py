"""Products of int8 rows with int4 or int8 weights, transposed: weights stand on the left.

A tensor core takes its left side from registers, where unpacked nibbles are, and its right side
from shared memory, where rows of activations are copied as they lie.

R rows, D inputs, F outputs, E experts, G groups of columns; a block of BF outputs, BN rows and BK
columns. SPLIT programs may share a block's columns; each leaves its sum, and `add_up` adds them.
"""

import triton
import triton.language as tl


@triton.jit
def round_rows(x, integer, scale, x_row, D: tl.constexpr, BD: tl.constexpr):
    """One row a program: its largest number becomes 127."""
    r = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    value = tl.load(x + r * x_row + d, mask=d < D, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(value), axis=0)
    step = tl.where(largest > 0, tl.div_rn(largest, 127.0), 1.0)
    ratio = tl.div_rn(value, step)
    # To the nearest, halves to even, as everywhere: 1.5 * 2^23 pushes the fraction out of float32.
    whole = (ratio + 12582912.0) - 12582912.0
    whole = tl.minimum(tl.maximum(whole, -127.0), 127.0)
    tl.store(integer + r * D + d, whole.to(tl.int8), mask=d < D)
    tl.store(scale + r, step)


@triton.jit
def _place(counts, tile, E: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr):
    """Which expert's rows a tile holds, its first row and the row behind the expert's last."""
    e = tl.arange(0, BE)
    count = tl.load(counts + e, mask=e < E, other=0)
    tiles = (count + BN - 1) // BN
    last = tl.cumsum(tiles, axis=0)
    before = (last <= tile) & (e < E)
    expert = tl.sum(before.to(tl.int32), axis=0)
    first_tile = tl.sum(tl.where(before, tiles, 0), axis=0)
    first_row = tl.sum(tl.where(before, count, 0), axis=0)
    mine = tl.sum(tl.where(e == expert, count, 0), axis=0)
    return expert, first_row + (tile - first_tile) * BN, first_row + mine


@triton.jit
def _add(
    whole, total, w, x, s_at, column,
    D: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """One block of columns more: whole numbers while one scale is for all, else scaled ones."""
    if G == 1:
        whole = tl.dot(w, x, acc=whole, out_dtype=tl.int32)
    else:
        scale = tl.load(s_at + column // (D // G))
        total += tl.dot(w, x, out_dtype=tl.int32).to(tl.float32) * scale[:, None]
    return whole, total


@triton.jit
def multiply(
    rows, row_scale, weight, scale, counts, out, R, F,
    D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, G: tl.constexpr, PACKED: tl.constexpr,
    BF: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    W: tl.constexpr = D // 2 if PACKED else D
    expert, first, end = _place(counts, tl.program_id(0), E, BE, BN)
    if expert < E:
        f = tl.program_id(1) * BF + tl.arange(0, BF)
        n = first + tl.arange(0, BN)
        k = tl.arange(0, BK)
        part = tl.program_id(2)
        inside = (f < F)[:, None] & (n < end)[None, :]
        # What is outside is read from inside, and not written.
        output = expert.to(tl.int64) * F + tl.where(f < F, f, 0)
        row = tl.where(n < end, n, first).to(tl.int64)
        w_at = weight + output[:, None] * W + k[None, :]
        x_at = rows + row[None, :] * D + k[:, None]
        s_at = scale + output * G
        whole = tl.zeros([BF, BN], dtype=tl.int32)
        total = tl.zeros([BF, BN], dtype=tl.float32)
        blocks: tl.constexpr = W // BK
        for block in range(part * blocks // SPLIT, (part + 1) * blocks // SPLIT):
            at = block * BK
            w = tl.load(w_at + at)
            if PACKED:
                left, right = (w << 4).to(tl.int8) >> 4, w >> 4
                whole, total = _add(whole, total, left, tl.load(x_at + at), s_at, at, D, G)
                at += W
                whole, total = _add(whole, total, right, tl.load(x_at + at), s_at, at, D, G)
            else:
                whole, total = _add(whole, total, w, tl.load(x_at + at), s_at, at, D, G)
        out_at = out + part.to(tl.int64) * R * F + row[None, :] * F + f[:, None]
        if SPLIT == 1:
            if G == 1:
                total = whole.to(tl.float32) * tl.load(s_at)[:, None]
            total *= tl.load(row_scale + row)[None, :]
            tl.store(out_at, total.to(out.dtype.element_ty), mask=inside)
        elif G == 1:
            tl.store(out_at, whole, mask=inside)
        else:
            tl.store(out_at, total, mask=inside)


@triton.jit
def add_up(
    parts, row_scale, scale, counts, out, R, F,
    E: tl.constexpr, BE: tl.constexpr, G: tl.constexpr, BF: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One row a program, BF of its outputs: the sums of all parts, scaled."""
    r = tl.program_id(0)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    at = r.to(tl.int64) * F + f
    total = tl.load(parts + at, mask=f < F, other=0)
    for part in range(1, SPLIT):
        total += tl.load(parts + part * tl.cast(R, tl.int64) * F + at, mask=f < F, other=0)
    value = total.to(tl.float32)
    if G == 1:
        expert, _, _ = _place(counts, r, E, BE, 1)
        value *= tl.load(scale + expert.to(tl.int64) * F + f, mask=f < F, other=0.0)
    value *= tl.load(row_scale + r)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=f < F)
