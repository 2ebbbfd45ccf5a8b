"""Both norms, forward and backward, a block of whole rows at a time.

D features, BD the power of two that holds them, ROWS of a block, LAYER for layer_norm.
"""

import triton
import triton.language as tl


@triton.jit
def forward(
    x, weight, bias, y, stats, eps, x_row, T,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, LAYER: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BD)
    inside = (t[:, None] < T) & (d[None, :] < D)
    row = t.to(tl.int64)
    wide = tl.load(x + row[:, None] * x_row + d[None, :], mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    if LAYER:
        mean = tl.sum(wide, 1) / D
        wide = tl.where(inside, wide - mean[:, None], 0.0)
        tl.store(stats + T + row, mean, mask=t < T)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)
    tl.store(stats + row, scale, mask=t < T)
    normed = wide * scale[:, None]
    if LAYER:
        out = normed * w[None, :] + tl.load(bias + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    else:  # rounded before it meets the weight
        out = normed.to(y.dtype.element_ty).to(tl.float32) * w[None, :]
    tl.store(y + row[:, None] * D + d[None, :], out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def backward(
    grad, x, weight, stats, dx, parts, g_row, x_row, T, PROGRAMS,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, LAYER: tl.constexpr,
):  # fmt: skip
    """dx of every PROGRAMS-th block, and this program's part of the parameters' gradients."""
    program = tl.program_id(0)
    d = tl.arange(0, BD)
    w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    dweight = tl.zeros((BD,), tl.float32)
    dbias = tl.zeros((BD,), tl.float32)
    for start in range(program * ROWS, T, PROGRAMS * ROWS):
        t = start + tl.arange(0, ROWS)
        row = t.to(tl.int64)
        inside = (t[:, None] < T) & (d[None, :] < D)
        g = tl.load(grad + row[:, None] * g_row + d[None, :], mask=inside, other=0.0).to(tl.float32)
        wide = tl.load(x + row[:, None] * x_row + d[None, :], mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(stats + row, mask=t < T, other=0.0)
        if LAYER:
            mean = tl.load(stats + T + row, mask=t < T, other=0.0)
            wide = tl.where(inside, wide - mean[:, None], 0.0)
        normed = wide * scale[:, None]
        if LAYER:
            dweight += tl.sum(g * normed, 0)
            dbias += tl.sum(g, 0)
        else:
            dweight += tl.sum(g * normed.to(dx.dtype.element_ty).to(tl.float32), 0)
        g = g * w[None, :]
        found = g - normed * (tl.sum(g * normed, 1) / D)[:, None]
        if LAYER:
            found = found - (tl.sum(g, 1) / D)[:, None]
        found = found * scale[:, None]
        tl.store(dx + row[:, None] * D + d[None, :], found.to(dx.dtype.element_ty), mask=inside)
    tl.store(parts + program * D + d, dweight, mask=d < D)
    if LAYER:
        tl.store(parts + (PROGRAMS + program) * D + d, dbias, mask=d < D)
