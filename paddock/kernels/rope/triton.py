"""Rotation of some dims of each head, and a copy of the others.

P pairs from dim FIRST on, AFTER dims behind them, BF and BA the powers of two that hold what is
before and behind, ROWS heads of a block.
"""

import triton
import triton.language as tl


@triton.jit
def rotate(
    x, cos, sin, out, TH, H, x_token, x_head,
    P: tl.constexpr, FIRST: tl.constexpr, AFTER: tl.constexpr, BF: tl.constexpr, BA: tl.constexpr,
    ROWS: tl.constexpr, INTERLEAVED: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = r.to(tl.int64)
    x += (row // H)[:, None] * x_token + (row % H)[:, None] * x_head
    out += row[:, None] * (FIRST + 2 * P + AFTER)
    inside = r[:, None] < TH
    p = tl.arange(0, P)[None, :]
    angle = (row // H)[:, None] * P + p
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    if BACK:
        s = -s
    if INTERLEAVED:
        d = FIRST + tl.arange(0, 2 * P)[None, :]
        pair = tl.load(x + d, mask=inside, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(pair, (ROWS, P, 2)))
        turned = tl.reshape(tl.join(a * c - b * s, a * s + b * c), (ROWS, 2 * P))
        tl.store(out + d, turned.to(out.dtype.element_ty), mask=inside)
    else:
        d = FIRST + p
        a = tl.load(x + d, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x + d + P, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + d, (a * c - b * s).to(out.dtype.element_ty), mask=inside)
        tl.store(out + d + P, (a * s + b * c).to(out.dtype.element_ty), mask=inside)
    if FIRST:
        d = tl.arange(0, BF)[None, :]
        before = inside & (d < FIRST)
        tl.store(out + d, tl.load(x + d, mask=before), mask=before)
    if AFTER:
        d = tl.arange(0, BA)[None, :]
        behind = inside & (d < AFTER)
        d = FIRST + 2 * P + d
        tl.store(out + d, tl.load(x + d, mask=behind), mask=behind)
