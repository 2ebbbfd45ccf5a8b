"""Rows that share an expert, a block of at most BM of them at a time, against its weights.

R rows (a token and one of its experts), E experts, D inputs, F outputs, N blocks. BR, BF and BD are
what a tile holds.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BM = 16  # rows of a block: the fewest that tensor cores multiply
BF, BD, WARPS, STAGES = 64, 128, 4, 4
PLANNED = 4096  # rows times experts of a tile of the plan


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Rows by expert: block n is row_NM[n] (-1: none) for expert_N[n] (-1: no such block)."""

    row_NM: Tensor
    expert_N: Tensor


@triton.jit
def plan_kernel(
    EXPERT, ROW, BLOCK, R, N, BE: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """One program: a counting sort whose work grows linearly with the rows. Rows per expert give
    the first block of each expert; a row's rank among those of its expert, in the order of rows,
    says which of its blocks it is in, and where."""
    e, n, t = tl.arange(0, BE), tl.arange(0, BN), tl.arange(0, STEP)
    for first in range(0, N, BN):
        tl.store(BLOCK + first + n, tl.full([BN], -1, tl.int32), mask=first + n < N)
    for first in range(0, N * BM, BN):
        tl.store(ROW + first + n, tl.full([BN], -1, tl.int32), mask=first + n < N * BM)
    counts = tl.zeros([BE], tl.int32)
    for first in range(0, R, STEP):
        mine = tl.load(EXPERT + first + t, mask=first + t < R, other=-1)
        counts += tl.sum((mine[:, None] == e[None, :]).to(tl.int32), 0)
    blocks = (counts + BM - 1) // BM
    begin = tl.cumsum(blocks, 0) - blocks
    tl.debug_barrier()  # other threads write over these blocks
    seen = tl.zeros([BE], tl.int32)  # rows of each expert in earlier tiles
    for first in range(0, R, STEP):
        r = first + t
        mine = tl.load(EXPERT + r, mask=r < R, other=-1)
        chosen = mine[:, None] == e[None, :]
        ones = chosen.to(tl.int32)
        rank_of_each = seen[None, :] + tl.cumsum(ones, 0) - ones
        rank = tl.sum(tl.where(chosen, rank_of_each, 0), 1)
        block = tl.sum(tl.where(chosen, begin[None, :], 0), 1) + rank // BM
        tl.store(ROW + block * BM + rank % BM, r, mask=r < R)
        tl.store(BLOCK + block, mine.to(tl.int32), mask=(r < R) & (rank % BM == 0))
        seen += tl.sum(ones, 0)


@triton.jit
def product_kernel(
    X, WEIGHT, ROW, BLOCK, OUT, share,
    D: tl.constexpr, F: tl.constexpr, GATED: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Rows r of a block read X[r // share]. With GATED the weight has F gate rows and F up rows,
    and silu(gate) * up comes out."""
    expert = tl.load(BLOCK + tl.program_id(0)).to(tl.int64)
    if expert >= 0:
        m, d = tl.arange(0, BM), tl.arange(0, BD)
        row = tl.load(ROW + tl.program_id(0) * BM + m)
        f = tl.program_id(1) * BF + tl.arange(0, BF)
        x_at = X + (tl.maximum(row, 0) // share).to(tl.int64)[None, :] * D
        rows = 2 * F if GATED else F
        w_at = WEIGHT + (expert * rows + tl.minimum(f, F - 1))[:, None] * D
        out = tl.zeros([BF, BM], tl.float32)
        up = tl.zeros([BF, BM], tl.float32)
        for start in range(0, D, BD):
            at = start + d
            x = tl.load(x_at + at[:, None], mask=(at < D)[:, None], other=0.0)
            w = tl.load(w_at + at[None, :], mask=(at < D)[None, :], other=0.0)
            out = tl.dot(w, x, out, input_precision="ieee")
            if GATED:
                u = tl.load(w_at + F * D + at[None, :], mask=(at < D)[None, :], other=0.0)
                up = tl.dot(u, x, up, input_precision="ieee")
        if GATED:
            out = out / (1 + tl.exp(-out)) * up
        there = OUT + row.to(tl.int64)[None, :] * F + f[:, None]
        tl.store(there, out.to(OUT.dtype.element_ty), mask=(row >= 0)[None, :] & (f < F)[:, None])


def plan_sizes(rows: int, experts: int) -> dict[str, int]:
    """What the tiles of the plan hold: a power of two of experts, and of rows."""
    width = max(16, triton.next_power_of_2(experts))
    step = min(max(2, PLANNED // width), triton.next_power_of_2(max(2, rows)))
    return {"BE": width, "BN": 128, "STEP": step}


def plan(expert_R: Tensor, experts: int) -> Work:
    """Blocks for these rows; as many as there could be, so that the host need not know."""
    R = len(expert_R)
    N = min(R, experts + R // BM)
    device = expert_R.device
    row_NM = torch.empty(N, BM, dtype=torch.int32, device=device)
    expert_N = torch.empty(N, dtype=torch.int32, device=device)
    plan_kernel[(1,)](expert_R, row_NM, expert_N, R, N, BM=BM, **plan_sizes(R, experts))
    return Work(row_NM, expert_N)


def gate_and_up(x_TD: Tensor, gate_up_EGD: Tensor, work: Work, out_RF: Tensor, share: int) -> None:
    """silu(gate x) * up x of every row; `share` rows stand for one token."""
    _multiply(x_TD, gate_up_EGD, work, out_RF, share, gated=True)


def down(x_RD: Tensor, down_EFD: Tensor, work: Work, out_RF: Tensor) -> None:
    _multiply(x_RD, down_EFD, work, out_RF, 1, gated=False)


def _multiply(x_TD: Tensor, weight: Tensor, work: Work, out_RF: Tensor, share: int, *, gated):
    D, F = x_TD.shape[1], out_RF.shape[1]
    grid = (len(work.expert_N), triton.cdiv(F, BF))
    product_kernel[grid](
        x_TD, weight, work.row_NM, work.expert_N, out_RF, share, D=D, F=F, GATED=gated,
        BM=BM, BF=BF, BD=min(BD, max(16, triton.next_power_of_2(D))),
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
