"""Products of int8 rows with int4 or int8 weights, transposed: weights stand on the left.

A tensor core takes its left side from registers, where unpacked nibbles are, and its right side
from shared memory, where rows of activations are copied as they lie.

R rows, D inputs, F outputs, E experts, G groups of columns; a block of BF outputs, BN rows and BK
columns. The warps of a program may share a block's columns, SLICES ways: few rows leave nothing to
do but read weights, and many warps reading them for few outputs need nobody else to add up.
"""

import triton
import triton.language as tl

SHRINK = tl.constexpr(0.0625)  # halves of bytes are taken times 16


@triton.jit
def _numbers(x, d, D: tl.constexpr, GATED: tl.constexpr):
    """Of one row; with GATED silu(gate) * up of a row that has D of each, rounded as a layer of its
    own would round it."""
    value = tl.load(x + d, mask=d < D, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x + D + d, mask=d < D, other=0.0).to(tl.float32)
        value = (value * tl.sigmoid(value) * up).to(x.dtype.element_ty).to(tl.float32)
    return value


@triton.jit
def round_rows(
    x, integer, scale, x_row,
    D: tl.constexpr, BD: tl.constexpr, BP: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """BP columns of one row a program: the row's largest number becomes 127."""
    r = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    row = _numbers(x + r * x_row, d, D, GATED)
    if BP == BD:
        value = row
    else:
        d = tl.program_id(1) * BP + tl.arange(0, BP)
        value = _numbers(x + r * x_row, d, D, GATED)
    largest = tl.max(tl.abs(row), axis=0)
    step = tl.where(largest > 0, tl.div_rn(largest, 127.0), 1.0)
    ratio = tl.div_rn(value, step)
    # To the nearest, halves to even, as everywhere: 1.5 * 2^23 pushes the fraction out of float32.
    whole = (ratio + 12582912.0) - 12582912.0
    whole = tl.minimum(tl.maximum(whole, -127.0), 127.0)
    tl.store(integer + r * D + d, whole.to(tl.int8), mask=d < D)
    if tl.program_id(1) == 0:
        tl.store(scale + r, step)


@triton.jit
def _place(counts, tile, R, E: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr):
    """Which expert's rows a tile holds, its first row and the row behind the expert's last."""
    if E == 1:
        expert, first, end = tl.cast(0, tl.int32), tile * BN, R
    else:
        e = tl.arange(0, BE)
        count = tl.load(counts + e, mask=e < E, other=0).to(tl.int32)
        tiles = (count + BN - 1) // BN
        last = tl.cumsum(tiles, axis=0)
        before = (last <= tile) & (e < E)
        expert = tl.sum(before.to(tl.int32), axis=0)
        first_tile = tl.sum(tl.where(before, tiles, 0), axis=0)
        first_row = tl.sum(tl.where(before, count, 0), axis=0)
        first = first_row + (tile - first_tile) * BN
        end = first_row + tl.sum(tl.where(e == expert, count, 0), axis=0)
    return expert, first, end


@triton.jit
def _halves(byte, WORDS: tl.constexpr):
    """The left and the right column of each byte, both times 16: a nibble that stands high in its
    byte has its sign already."""
    if WORDS:
        # A compiler would shift byte by byte; what a word's shift brings from the next is masked.
        left = tl.inline_asm_elementwise(
            "{.reg .b32 high; shl.b32 high, $1, 4; and.b32 $0, high, 0xF0F0F0F0;}", "=r,r", [byte],
            dtype=tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        left = (byte << 4).to(tl.int8)
    return left, (byte & -16).to(tl.int8)


@triton.jit
def _add(
    whole, total, w, x, s_at, column, D: tl.constexpr, G: tl.constexpr, shrink: tl.constexpr
):  # fmt: skip
    """One block of columns more: whole numbers while one scale is for all, else scaled ones."""
    if G == 1:
        whole = tl.dot(w, x, acc=whole, out_dtype=tl.int32)
    else:
        scale = tl.load(s_at + column // (D // G)) * shrink
        total += tl.dot(w, x, out_dtype=tl.int32).to(tl.float32) * scale
    return whole, total


@triton.jit
def _walk(
    whole, total, w_at, x_at, s_at, column, there,
    D: tl.constexpr, G: tl.constexpr, PACKED: tl.constexpr, STEP: tl.constexpr,
    JOINT: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """All columns, STEP bytes of a row of weights at a time."""
    W: tl.constexpr = D // 2 if PACKED else D
    for at in range(0, W, STEP):
        w = tl.load(w_at + at)
        x = tl.load(x_at + at, mask=there, other=0)
        if not PACKED:
            whole, total = _add(whole, total, w, x, s_at, column + at, D, G, 1.0)
        else:
            left, right = _halves(w, WORDS)
            if JOINT:  # one product, not two, of which each would wait for the one before
                both = tl.join(left, right).permute(0, 2, 1).reshape(w.shape[0], 2 * w.shape[1])
                whole, total = _add(whole, total, both, x, s_at, at, D, G, SHRINK)
            else:
                y = tl.load(x_at + at + W, mask=there, other=0)
                whole, total = _add(whole, total, left, x, s_at, column + at, D, G, SHRINK)
                whole, total = _add(whole, total, right, y, s_at, column + at + W, D, G, SHRINK)
    return whole, total


@triton.jit
def _together(
    rows, weight, scale, output, row, there,
    D: tl.constexpr, G: tl.constexpr, PACKED: tl.constexpr, BF: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """[BF, BN]: all warps at the same columns."""
    W: tl.constexpr = D // 2 if PACKED else D
    JOINT: tl.constexpr = PACKED and G == 1
    k = tl.arange(0, BK)
    if JOINT:  # bytes of weights stand for two runs of columns
        pair = tl.arange(0, 2 * BK)
        d = pair % BK + pair // BK * W
    else:
        d = k
    whole, total = tl.zeros([BF, BN], dtype=tl.int32), tl.zeros([BF, BN], dtype=tl.float32)
    return _walk(
        whole, total, weight + output[:, None] * W + k[None, :],
        rows + row[None, :] * D + d[:, None], scale + output[:, None] * G, 0, there[None, :],
        D, G, PACKED, BK, JOINT, WORDS,
    )  # fmt: skip


@triton.jit
def _apart(
    rows, weight, scale, output, row, there,
    D: tl.constexpr, G: tl.constexpr, PACKED: tl.constexpr, BF: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, SLICES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """[BF, BN]: SLICES warps at columns of their own, added up at the end."""
    W: tl.constexpr = D // 2 if PACKED else D
    k = tl.arange(0, BK)
    column = tl.arange(0, SLICES)[:, None, None] * BK
    whole = tl.zeros([SLICES, BF, BN], dtype=tl.int32)
    total = tl.zeros([SLICES, BF, BN], dtype=tl.float32)
    whole, total = _walk(
        whole, total, weight + output[None, :, None] * W + column + k[None, None, :],
        rows + row[None, None, :] * D + column + k[None, :, None],
        scale + output[None, :, None] * G, column, there[None, None, :],
        D, G, PACKED, BK * SLICES, False, WORDS,
    )  # fmt: skip
    return tl.sum(whole, axis=0), tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["R"])
def multiply(
    rows, row_scale, source, weight, scale, counts, out, R, F,
    D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, G: tl.constexpr, PACKED: tl.constexpr,
    BF: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SLICES: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """A block of outputs of one expert's rows, which stand at `source` where that is given."""
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    output = tl.where(f < F, f, 0).to(tl.int64)  # what is outside is read from inside, not written
    expert, first, end = _place(counts, tl.program_id(0), R, E, BE, BN)
    if first < end:
        output += expert.to(tl.int64) * F
        n = first + tl.arange(0, BN)
        row = tl.where(n < end, n, first).to(tl.int64)
        read = row
        if source is not None:
            read = tl.load(source + row).to(tl.int64)
        if SLICES == 1:
            whole, total = _together(
                rows, weight, scale, output, read, n < end, D, G, PACKED, BF, BN, BK, WORDS
            )
        else:
            whole, total = _apart(
                rows, weight, scale, output, read, n < end, D, G, PACKED, BF, BN, BK, SLICES, WORDS
            )
        if G == 1:
            shrink: tl.constexpr = SHRINK if PACKED else 1.0
            total = whole.to(tl.float32) * (tl.load(scale + output) * shrink)[:, None]
        total *= tl.load(row_scale + read)[None, :]
        inside = (f < F)[:, None] & (n < end)[None, :]
        tl.store(out + row[None, :] * F + f[:, None], total.to(out.dtype.element_ty), mask=inside)
