"""silu(gate) * up and its gradients. R rows, F columns, a block of ROWS and BF of them."""

import triton
import triton.language as tl


@triton.jit
def _block(R, F: tl.constexpr, ROWS: tl.constexpr, BF: tl.constexpr):
    """Rows and columns of this program's block, and which of them there are."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    return r.to(tl.int64)[:, None], f[None, :], (r[:, None] < R) & (f[None, :] < F)


@triton.jit
def forward(gate, up, out, R, g_row, u_row, F: tl.constexpr, ROWS: tl.constexpr, BF: tl.constexpr):
    r, f, inside = _block(R, F, ROWS, BF)
    a = tl.load(gate + r * g_row + f, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + r * u_row + f, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + r * F + f, (a * tl.sigmoid(a) * b).to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward(
    grad, gate, up, dgate, dup, R, y_row, g_row, u_row, dg_row, du_row,
    F: tl.constexpr, ROWS: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    r, f, inside = _block(R, F, ROWS, BF)
    y = tl.load(grad + r * y_row + f, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(gate + r * g_row + f, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + r * u_row + f, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(a)
    slope = share * (1.0 + a * (1.0 - share))
    tl.store(dgate + r * dg_row + f, (y * b * slope).to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + r * du_row + f, (y * a * share).to(dup.dtype.element_ty), mask=inside)
