"""Products of symmetric matrices that commute: one triangle of tiles is computed and mirrored.

Z matrices of M rows; K is what is summed over. A tile has BM rows and as many columns.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(number):
    """Row block and column block of the tiles on and below the diagonal, counted row by row."""
    block = ((tl.sqrt_rn(8.0 * number + 1.0) - 1.0) * 0.5).to(tl.int32)
    return block, number - block * (block + 1) // 2


@triton.jit
def symmetric_kernel(
    A, B, OUT, a, b, c, M, K, matrix, row, column,
    POLYNOMIAL: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """OUT = A B^T, or a I + b B + c A B^T with POLYNOMIAL. A and B lie alike: `matrix` elements
    from one to the next, `row` and `column` from a row or column to the next. EVEN says that tiles
    end where the matrices do.

    Every element on or below the diagonal is written by one program, there and above: the result
    is symmetric to the last bit, and two runs agree.
    """
    z = tl.program_id(1).to(tl.int64)
    block_r, block_s = _tile(tl.program_id(0))
    r = block_r * BM + tl.arange(0, BM)
    s = block_s * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    far_r, far_s = r.to(tl.int64)[:, None] * row, s.to(tl.int64)[:, None] * row
    a_at = A + z * matrix + far_r + k[None, :] * column
    b_at = B + z * matrix + far_s + k[None, :] * column
    acc = tl.zeros([BM, BM], tl.float32)
    for start in range(0, K, BK):
        if EVEN:
            x, y = tl.load(a_at), tl.load(b_at)
        else:
            inside = (k < K - start)[None, :]
            x = tl.load(a_at, mask=inside & (r < M)[:, None], other=0.0)
            y = tl.load(b_at, mask=inside & (s < M)[:, None], other=0.0)
        acc = tl.dot(x, tl.trans(y), acc, input_precision="ieee")
        a_at += BK * column
        b_at += BK * column
    below = (r[:, None] >= s[None, :]) & (r[:, None] < M)
    if POLYNOMIAL:
        b_at = B + z * matrix + far_r + s[None, :] * column
        linear = tl.load(b_at, mask=below, other=0.0).to(tl.float32)
        acc = c * acc + b * linear + tl.where(r[:, None] == s[None, :], a, 0.0)
    value = acc.to(OUT.dtype.element_ty)
    OUT += z * M * M
    tl.store(OUT + r.to(tl.int64)[:, None] * M + s[None, :], value, mask=below)
    above = (s[:, None] < r[None, :]) & (r[None, :] < M)
    tl.store(OUT + s.to(tl.int64)[:, None] * M + r[None, :], tl.trans(value), mask=above)
