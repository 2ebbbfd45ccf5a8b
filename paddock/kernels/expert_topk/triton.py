"""The best of a few, taken one after the other. E experts, BE the power of two that holds them."""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def choose(score, index, T, E: tl.constexpr, K: tl.constexpr, BE: tl.constexpr, ROWS: tl.constexpr):
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, BE)
    row = t.to(tl.int64)
    inside = (t[:, None] < T) & (e[None, :] < E)
    left = tl.load(score + row[:, None] * E + e[None, :], mask=inside, other=0.0)
    # -inf and NaN may still be chosen; what is taken, or no expert at all, may not.
    left = tl.where(left >= LOWEST, left, LOWEST)
    left = tl.where(e[None, :] < E, left, float("-inf"))
    taken = tl.zeros((ROWS, BE), tl.int32)
    for _ in range(K):
        now = e[None, :] == tl.argmax(left, 1)[:, None]
        taken = tl.where(now, 1, taken)
        left = tl.where(now, float("-inf"), left)
    place = tl.cumsum(taken, 1) - 1
    to = index + row[:, None] * K + place
    name = tl.broadcast_to(e[None, :], (ROWS, BE)).to(tl.int64)
    tl.store(to, name, mask=inside & (taken > 0))
