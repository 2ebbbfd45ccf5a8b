"""Sparse latent attention in plain Triton: any GPU, any head count, any width up to 512.

One program takes one query and a block of its heads, and walks over the kept rows in tiles. A row
is loaded once and serves as key and as value. In the CPU interpreter the same kernels are tested.

T queries, H heads, C row width, V value columns, R the columns after them, S rows, K slots.
HB heads and BK slots of one tile; VP and RP are V and R rounded up to a power of two.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .problem import Attended, Problem, from_sums, row_sums

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# A running maximum must be finite: -inf minus -inf is no number.
LOWEST = tl.constexpr(-1e30)
# What a thread block of the oldest GPU in mind may hold.
LEAST_SHARED_BYTES = 99 << 10
# From here on several small programs fit beside one another.
ROOM_TO_SHARE = 160 << 10
SMALL_BYTES = 4 << 10  # indices and what a sum over warps passes through
# Programs that unite lists, eight on each multiprocessor of a large GPU, and marks of them all.
UNION_PROGRAMS = 1056
UNION_MARKS = 256 << 20


@triton.jit
def count_kernel(INDEX, COUNT, WHOLE, T, K, BT: tl.constexpr, BK: tl.constexpr):
    """COUNT[t]: slots up to and including the last one that names a key. WHOLE[t]: those before the
    first one that names none."""
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    last = tl.zeros([BT], tl.int32)
    gap = tl.zeros([BT], tl.int32) + K
    for start in range(0, K, BK):
        slot = start + tl.arange(0, BK)
        inside = (t < T)[:, None] & (slot < K)[None, :]
        index = tl.load(INDEX + t[:, None] * K + slot[None, :], mask=inside, other=-1)
        last = tl.maximum(last, tl.max(tl.where(index >= 0, slot[None, :] + 1, 0), 1))
        gap = tl.minimum(gap, tl.min(tl.where(index >= 0, K, slot[None, :]), 1))
    tl.store(COUNT + t, last, mask=t < T)
    tl.store(WHOLE + t, gap, mask=t < T)


@triton.jit
def union_kernel(INDEX, MARK, LIST, COUNT, T, K, S, U, groups, G: tl.constexpr, B: tl.constexpr):
    """Rows that any of G neighbouring queries keeps, ascending, each with a bit for every keeper.

    Bit g of a row's mark says that query g keeps it; a word of the list holds the row below the
    marks. MARK [programs, S] must come zeroed, and is left so. Lists end in zeros (a row that
    nobody keeps) up to a whole number of 128 slots, at least once that.
    """
    mark = MARK + tl.program_id(0).to(tl.int64) * S
    group = tl.program_id(0).to(tl.int64)
    while group < groups:
        lowest = S
        highest = -1
        for g in tl.static_range(G):
            t = group * G + g
            slots = tl.where(t < T, K, 0)
            for start in range(0, K, B):
                slot = start + tl.arange(0, B)
                index = tl.load(INDEX + t * K + slot, mask=slot < slots, other=-1)
                kept = index >= 0
                others = tl.load(mark + index, mask=kept, other=0)
                tl.store(mark + index, (others | (1 << g)).to(tl.uint8), mask=kept)
                lowest = tl.minimum(lowest, tl.min(tl.where(kept, index, S), 0))
                highest = tl.maximum(highest, tl.max(index, 0))
            tl.debug_barrier()  # the next query reads these marks, by other threads
        words = LIST + group * U
        count = 0
        for start in range(lowest // B * B, highest + 1, B):
            row = start + tl.arange(0, B)
            marks = tl.load(mark + row, mask=row <= highest, other=0).to(tl.int32)
            here = marks != 0
            place = count + tl.cumsum(here.to(tl.int32), 0) - 1
            tl.store(words + place, row | (marks << (31 - G)), mask=here)
            tl.store(mark + row, tl.zeros([B], tl.uint8), mask=here)
            count += tl.sum(here.to(tl.int32), 0)
        after = count + tl.arange(0, 128)
        end = tl.maximum(tl.cdiv(count, 128), 1) * 128
        tl.store(words + after, tl.zeros([128], tl.int32), mask=after < end)
        tl.store(COUNT + group, count)
        tl.debug_barrier()
        group += tl.num_programs(0)


@triton.jit
def delta_kernel(OUT, GRAD, DELTA, TH, V: tl.constexpr, VP: tl.constexpr, B: tl.constexpr):
    """DELTA[t, h] = OUT[t, h] . GRAD[t, h], over T * H rows of V."""
    row = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    column = tl.arange(0, VP)
    inside = (row < TH)[:, None] & (column < V)[None, :]
    at = row[:, None] * V + column[None, :]
    out = tl.load(OUT + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(GRAD + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(DELTA + row, tl.sum(out * grad, 1), mask=row < TH)


@triton.jit
def load_columns(base, width: tl.constexpr, padded: tl.constexpr, inside):
    """Rows at `base` [N, 1], `width` columns, zeros where outside. A mask only where one is due."""
    column = tl.arange(0, padded)[None, :]
    if width == padded:
        return tl.load(base + column, mask=inside, other=0.0)
    return tl.load(base + column, mask=inside & (column < width), other=0.0)


@triton.jit
def forward_kernel(
    QUERY,
    ROW,
    INDEX,
    COUNT,
    OUT,
    LSE,
    scale,
    H,
    K,
    V: tl.constexpr,
    R: tl.constexpr,
    HB: tl.constexpr,
    BK: tl.constexpr,
    VP: tl.constexpr,
    RP: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HB + tl.arange(0, HB)
    mine = (head < H)[:, None]
    count = tl.load(COUNT + t)
    query = QUERY + (t * H + head)[:, None] * (V + R)
    query_v = load_columns(query, V, VP, mine)
    if R > 0:
        query_r = load_columns(query + V, R, RP, mine)
    top = tl.full([HB], LOWEST, tl.float32)
    total = tl.zeros([HB], tl.float32)
    acc = tl.zeros([HB, VP], tl.float32)
    for start in range(0, count, BK):
        slot = start + tl.arange(0, BK)
        index = tl.load(INDEX + t * K + slot, mask=slot < count, other=-1)
        kept = index >= 0
        row = ROW + tl.maximum(index, 0).to(tl.int64)[:, None] * (V + R)
        row_v = load_columns(row, V, VP, kept[:, None])
        score = tl.dot(query_v, tl.trans(row_v), input_precision="ieee")
        if R > 0:
            row_r = load_columns(row + V, R, RP, kept[:, None])
            score = tl.dot(query_r, tl.trans(row_r), score, input_precision="ieee")
        score = tl.where(kept[None, :], score * (scale * LOG2_E), float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        prob = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(prob, 1)
        acc = tl.dot(prob.to(row_v.dtype), row_v, acc * shrink[:, None], input_precision="ieee")
        top = higher
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    column = tl.arange(0, VP)[None, :]
    at = (t * H + head)[:, None] * V + column
    tl.store(OUT + at, (acc / total[:, None]).to(OUT.dtype.element_ty), mask=mine & (column < V))
    lse = tl.where(empty, float("inf"), top * LN_2 + tl.log(total))
    tl.store(LSE + t * H + head, lse, mask=head < H)


@triton.jit
def add_rows(at, x, unit, inside):
    """Add a tile into the row gradients, as floats or counted in units."""
    if at.dtype.element_ty == tl.int64:
        tl.atomic_add(at, (x * unit).to(tl.int64), mask=inside, sem="relaxed")
    else:
        tl.atomic_add(at, x, mask=inside, sem="relaxed")


# Longer than functions here may be: one walk over the tiles, all gradients at once.
@triton.jit
def backward_kernel(  # noqa: PLR0915
    QUERY,
    ROW,
    INDEX,
    COUNT,
    GRAD,
    LSE,
    DELTA,
    UNIT,
    DQUERY,
    DROW,
    scale,
    H,
    K,
    V: tl.constexpr,
    R: tl.constexpr,
    HB: tl.constexpr,
    BK: tl.constexpr,
    VP: tl.constexpr,
    RP: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HB + tl.arange(0, HB)
    mine = (head < H)[:, None]
    count = tl.load(COUNT + t)
    unit = tl.load(UNIT)
    query = QUERY + (t * H + head)[:, None] * (V + R)
    query_v = load_columns(query, V, VP, mine)
    grad = load_columns(GRAD + (t * H + head)[:, None] * V, V, VP, mine)
    # +inf for heads there are none of: their probabilities, and so all they add, are zero.
    lse = tl.load(LSE + t * H + head, mask=head < H, other=float("inf")) * LOG2_E
    delta = tl.load(DELTA + t * H + head, mask=head < H, other=0.0)
    dquery_v = tl.zeros([HB, VP], tl.float32)
    if R > 0:
        query_r = load_columns(query + V, R, RP, mine)
        dquery_r = tl.zeros([HB, RP], tl.float32)
    column_v, column_r = tl.arange(0, VP)[None, :], tl.arange(0, RP)[None, :]
    for start in range(0, count, BK):
        slot = start + tl.arange(0, BK)
        index = tl.load(INDEX + t * K + slot, mask=slot < count, other=-1)
        kept = (index >= 0)[:, None]
        offset = tl.maximum(index, 0).to(tl.int64)[:, None] * (V + R)
        row_v = load_columns(ROW + offset, V, VP, kept)
        score = tl.dot(query_v, tl.trans(row_v), input_precision="ieee")
        if R > 0:
            row_r = load_columns(ROW + offset + V, R, RP, kept)
            score = tl.dot(query_r, tl.trans(row_r), score, input_precision="ieee")
        dprob = tl.dot(grad, tl.trans(row_v), input_precision="ieee")
        prob = tl.exp2(score * (scale * LOG2_E) - lse[:, None])
        prob = tl.where((index >= 0)[None, :], prob, 0.0)
        dscore = (prob * (dprob - delta[:, None]) * scale).to(row_v.dtype)
        prob = prob.to(row_v.dtype)
        dquery_v = tl.dot(dscore, row_v, dquery_v, input_precision="ieee")
        drow_v = tl.dot(tl.trans(dscore), query_v, input_precision="ieee")
        drow_v = tl.dot(tl.trans(prob), grad, drow_v, input_precision="ieee")
        add_rows(DROW + offset + column_v, drow_v, unit, kept & (column_v < V))
        if R > 0:
            dquery_r = tl.dot(dscore, row_r, dquery_r, input_precision="ieee")
            drow_r = tl.dot(tl.trans(dscore), query_r, input_precision="ieee")
            add_rows(DROW + offset + V + column_r, drow_r, unit, kept & (column_r < R))
    at = DQUERY + (t * H + head)[:, None] * (V + R)
    dtype = DQUERY.dtype.element_ty
    tl.store(at + column_v, dquery_v.to(dtype), mask=mine & (column_v < V))
    if R > 0:
        tl.store(at + V + column_r, dquery_r.to(dtype), mask=mine & (column_r < R))


@dataclass(frozen=True, slots=True)
class Tile:
    """How much of a problem one program holds at a time."""

    heads: int
    slots: int
    warps: int
    stages: int

    @classmethod
    def of(cls, problem: Problem, *, backward: bool) -> "Tile":
        """The largest that fits, heads first: a row loaded for more heads is loaded less often.

        Programs of few heads are small; two or three share a multiprocessor, so that one
        multiplies while another waits for its rows.
        """
        most = 32 if backward else 64  # a backward tile of 64 heads would not fit any GPU
        heads = min(max(16, triton.next_power_of_2(problem.query_THC.shape[1])), most)
        width = padded(problem.value) + padded(problem.rest)
        warps = 8 if width > 384 or heads == 64 else 4
        size, room = problem.row_SC.element_size(), _shared_bytes(problem.row_SC.device)
        if room >= ROOM_TO_SHARE:
            room //= 1 if heads == 64 else 2 if backward or warps == 8 else 3
        for HB in (h for h in (64, 32, 16) if h <= heads):
            held = HB * size * (2 * width if backward else width) + SMALL_BYTES
            for BK in (32, 16) if backward else (64, 32, 16):
                for stages in (3, 2):
                    # The stage being multiplied waits in registers, except for 64 heads; backward,
                    # there is its gradient on its way out.
                    waiting = stages if backward else max(stages - 1, HB // 32)
                    if held + waiting * BK * size * width <= room:
                        return cls(HB, BK, warps, stages)
        return cls(16, 16, warps, 1)


def padded(width: int) -> int:
    """Columns of a tile that holds `width` columns.

    >>> padded(48), padded(12), padded(0)
    (64, 16, 0)
    """
    return max(16, triton.next_power_of_2(width)) if width else 0


def counts(index_TK: Tensor) -> tuple[Tensor, Tensor]:
    """[T] int32 each: how many leading slots of a row must be visited, and how many leading ones
    all name a key."""
    T, K = index_TK.shape
    count_T, whole_T = index_TK.new_empty(2, T, dtype=torch.int32)
    count_kernel[(triton.cdiv(T, 4),)](index_TK, count_T, whole_T, T, K, BT=4, BK=1024)
    return count_T, whole_T


def unions(index_TK: Tensor, rows: int, together: int) -> tuple[Tensor, Tensor]:
    """[N, U] and [N]: one list for every `together` neighbouring queries, and how long it is."""
    T, K = index_TK.shape
    N, U = triton.cdiv(T, together), triton.cdiv(min(together * K, rows), 128) * 128
    programs = min(N, max(UNION_MARKS // rows, 1), UNION_PROGRAMS)
    device = index_TK.device
    mark = torch.zeros(programs, rows, dtype=torch.uint8, device=device)
    list_NU = torch.empty(N, U, dtype=torch.int32, device=device)
    count_N = torch.empty(N, dtype=torch.int32, device=device)
    union_kernel[(programs,)](
        index_TK, mark, list_NU, count_N, T, K, rows, U, N, G=together, B=1024
    )
    return list_NU, count_N


def deltas(out_THV: Tensor, grad_THV: Tensor) -> Tensor:
    """[T, H] float32: how much each head's output, scaled as a whole, would change the loss."""
    T, H, V = out_THV.shape
    delta_TH = torch.empty(T, H, dtype=torch.float32, device=out_THV.device)
    grid = (triton.cdiv(T * H, 16),)
    delta_kernel[grid](out_THV, grad_THV, delta_TH, T * H, V=V, VP=padded(V), B=16)
    return delta_TH


def forward(problem: Problem, tile: Tile | None = None) -> Attended:
    """Output and log-sum-exp of every query; tensors contiguous."""
    query_THC, value = problem.query_THC, problem.value
    T, H, _ = query_THC.shape
    tile = tile or Tile.of(problem, backward=False)
    out_THV = query_THC.new_empty(T, H, value)
    lse_TH = torch.empty(T, H, dtype=torch.float32, device=query_THC.device)
    forward_kernel[(T, triton.cdiv(H, tile.heads))](
        query_THC,
        problem.row_SC,
        problem.index_TK,
        counts(problem.index_TK)[0],
        out_THV,
        lse_TH,
        problem.scale,
        H,
        problem.index_TK.shape[1],
        **_constants(problem, tile),
    )
    return Attended(out_THV, lse_TH)


def backward(
    problem: Problem,
    attended: Attended,
    grad_THV: Tensor,
    *,
    deterministic: bool,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of queries and rows. The first is always the same; the second if asked."""
    query_THC = problem.query_THC
    T, H, _ = query_THC.shape
    tile = tile or Tile.of(problem, backward=True)
    dquery_THC = torch.empty_like(query_THC)
    sum_SC, unit = row_sums(problem, grad_THV, fixed=deterministic)
    backward_kernel[(T, triton.cdiv(H, tile.heads))](
        query_THC,
        problem.row_SC,
        problem.index_TK,
        counts(problem.index_TK)[0],
        grad_THV,
        attended.lse_TH,
        deltas(attended.out_THV, grad_THV),
        unit,
        dquery_THC,
        sum_SC,
        problem.scale,
        H,
        problem.index_TK.shape[1],
        **_constants(problem, tile),
    )
    return dquery_THC, from_sums(sum_SC, unit, problem.row_SC.dtype)


def _constants(problem: Problem, tile: Tile) -> dict[str, int]:
    V, R = problem.value, problem.rest
    return {
        "V": V,
        "R": R,
        "HB": tile.heads,
        "BK": tile.slots,
        "VP": padded(V),
        "RP": padded(R) or 16,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return LEAST_SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", LEAST_SHARED_BYTES)
