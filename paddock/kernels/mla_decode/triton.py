"""Absorbed attention of few queries, its keys cut into parts that many programs share.

A first kernel attends to one part of a sequence's keys and leaves an unfinished sum; a second one
adds the parts up. How a sequence is cut depends on its own length, which the kernels read, and on
how many sequences there are; the grid depends on no length, so a graph may hold both launches. The
keys are all that a sequence has or, given INDEX, those that were chosen.

B sequences of X = Q * H rows (its queries' heads), C row width, V value columns, R the columns
after them, K chosen keys, P pages of the longest. XB rows and BK keys of a tile; VP and RP are V
and R rounded up to a power of two.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paddock.kernels.block_table import BlockTable
from paddock.kernels.sparse_mla.problem import Problem
from paddock.kernels.sparse_mla.triton import LOG2_E, LOWEST, Tile, load_columns, padded

# Parts of a long sequence, and programs that are enough to fill a large GPU twice.
MOST_PARTS, FEWEST_PARTS, ENOUGH = 128, 8, 256
# Keys of a part, at least: where there are few programs, two tiles of 64; where there are many,
# more of them for each row of sums that a part leaves behind. Chosen keys are half as many.
LEAST = ((4, 128), (16, 256), (1 << 31, 512))
SUM_PARTS, SUM_COLUMNS = 32, 128  # parts and columns that the second kernel holds at once


@triton.jit
def _seen(VISIBLE, b, queries):
    """How many keys the most seeing query of a sequence sees."""
    seen = tl.load(VISIBLE + b * queries)
    for q in range(1, queries):
        seen = tl.maximum(seen, tl.load(VISIBLE + b * queries + q))
    return seen


@triton.jit
def part_keys(seen, PARTS: tl.constexpr, LEAST: tl.constexpr, BK: tl.constexpr):
    """Keys of each part of a sequence: whole tiles."""
    return tl.maximum(tl.cdiv(tl.cdiv(seen, PARTS), BK) * BK, LEAST)


@triton.jit
def columns(base, width: tl.constexpr, padded: tl.constexpr):
    """Rows at `base` [N, 1], `width` columns."""
    column = tl.arange(0, padded)[None, :]
    if width == padded:
        return tl.load(base + column)
    return tl.load(base + column, mask=column < width, other=0.0)


# Longer than functions here may be: two ways to find a key, one way to attend to it.
@triton.jit(do_not_specialize=["queries", "pages", "chosen"])
def part_kernel(  # noqa: PLR0915
    QUERY, ROW, PAGE, INDEX, VISIBLE, SUM, TOP, TOTAL, scale, X, H, queries, pages, chosen,
    V: tl.constexpr, R: tl.constexpr, XB: tl.constexpr, BK: tl.constexpr, VP: tl.constexpr,
    RP: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    part, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    seen = _seen(VISIBLE, b, queries) if INDEX is None else chosen
    keys = part_keys(seen, PARTS, LEAST, BK)
    begin = part * keys
    end = tl.minimum(begin + keys, seen)
    if begin < end:
        x = tl.program_id(0) * XB + tl.arange(0, XB)
        mine = (x < X)[:, None]
        query = QUERY + (b * X + x)[:, None] * (V + R)
        query_v = load_columns(query, V, VP, mine)
        if R > 0:
            query_r = load_columns(query + V, R, RP, mine)
        if INDEX is None:
            visible = tl.load(VISIBLE + b * queries + x // H, mask=x < X, other=0)
            page_row = PAGE + b * pages
        else:
            page_row = PAGE + b // queries * pages
        top = tl.full([XB], LOWEST, tl.float32)
        total = tl.zeros([XB], tl.float32)
        acc = tl.zeros([XB, VP], tl.float32)
        # Addresses of the tiles, hoisted out of the loop, would not fit into registers.
        for start in tl.range(begin, end, BK, disable_licm=True):
            at = start + tl.arange(0, BK)
            # Where there is no key, one that is there is read: loads need no mask.
            if INDEX is None:
                key = tl.minimum(at, end - 1)
                seen_xk = at[None, :] < tl.minimum(visible, end)[:, None]
            else:
                index = tl.load(INDEX + b * chosen + at, mask=at < end, other=-1)
                key = tl.maximum(index, 0)
                seen_xk = (index >= 0)[None, :]
            slot = tl.load(page_row + key // SIZE).to(tl.int64) * SIZE + key % SIZE
            row = ROW + slot[:, None] * (V + R)
            row_v = columns(row, V, VP)
            score = tl.dot(query_v, tl.trans(row_v), input_precision="ieee")
            if R > 0:
                row_r = columns(row + V, R, RP)
                score = tl.dot(query_r, tl.trans(row_r), score, input_precision="ieee")
            score = tl.where(seen_xk, score * (scale * LOG2_E), float("-inf"))
            higher = tl.maximum(top, tl.max(score, 1))
            prob = tl.exp2(score - higher[:, None])
            shrink = tl.exp2(top - higher)
            total = total * shrink + tl.sum(prob, 1)
            acc = tl.dot(prob.to(row_v.dtype), row_v, acc * shrink[:, None], input_precision="ieee")
            top = higher
        at_row = (b * PARTS + part) * X + x
        column = tl.arange(0, VP)[None, :]
        tl.store(SUM + at_row[:, None] * V + column, acc, mask=mine & (column < V))
        tl.store(TOP + at_row, top, mask=x < X)
        tl.store(TOTAL + at_row, total, mask=x < X)


@triton.jit(do_not_specialize=["queries", "chosen"])
def sum_kernel(
    SUM, TOP, TOTAL, VISIBLE, OUT, X, queries, chosen,
    V: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, LEAST: tl.constexpr,
    BP: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One row of one sequence, BV of its columns: the parts weighed by how much each has seen."""
    x, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    seen = chosen if VISIBLE is None else _seen(VISIBLE, b, queries)
    parts = tl.cdiv(seen, part_keys(seen, PARTS, LEAST, BK))
    column = tl.program_id(1) * BV + tl.arange(0, BV)
    top = LOWEST + 0.0
    total = 0.0
    acc = tl.zeros([BV], tl.float32)
    for first in range(0, parts, BP):
        part = first + tl.arange(0, BP)
        at = (b * PARTS + part) * X + x
        tops = tl.load(TOP + at, mask=part < parts, other=LOWEST)
        totals = tl.load(TOTAL + at, mask=part < parts, other=0.0)
        inside = (part < parts)[:, None] & (column < V)[None, :]
        sums = tl.load(SUM + at[:, None] * V + column[None, :], mask=inside, other=0.0)
        higher = tl.maximum(top, tl.max(tops, 0))
        weight = tl.exp2(tops - higher)
        shrink = tl.exp2(top - higher)
        acc = acc * shrink + tl.sum(sums * weight[:, None], 0)
        total = total * shrink + tl.sum(totals * weight, 0)
        top = higher
    total = tl.where(total == 0, 1.0, total)
    out = OUT + (b * X + x) * V + column
    tl.store(out, (acc / total).to(OUT.dtype.element_ty), mask=column < V)


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """Queries, the rows they look at, and which: all that `visible_BQ` says or `index_BK` names.

    Chosen keys are each query's own: then B counts queries, and `queries` of them share pages.
    """

    query_BXC: Tensor
    row_SC: Tensor
    pages: BlockTable
    heads: int
    queries: int
    scale: float
    value: int
    visible_BQ: Tensor | None = None
    index_BK: Tensor | None = None


def attend(asked: Asked) -> Tensor:
    """[B, X, value] in the query's dtype."""
    query_BXC, V, index_BK = asked.query_BXC.contiguous(), asked.value, asked.index_BK
    (B, X, C), row_SC, page_BP = query_BXC.shape, asked.row_SC, asked.pages.page_BP
    assert row_SC.stride() == (C, 1) and page_BP.stride(1) == 1
    problem = Problem(query_BXC, row_SC, query_BXC.new_empty(0), asked.scale, V)
    tile = Tile.of(problem, backward=False)
    blocks = triton.cdiv(X, tile.heads)
    most, least = cut(B * blocks)
    chosen, visible_BQ = 0, asked.visible_BQ
    if index_BK is not None:
        chosen, index_BK, least = index_BK.shape[1], index_BK.contiguous(), least // 2
        most = min(most, triton.next_power_of_2(triton.cdiv(chosen, least)))
    else:
        visible_BQ = visible_BQ.contiguous()
    parts = {"PARTS": most, "LEAST": least}
    sum_BZXV = torch.empty(B, most, X, V, dtype=torch.float32, device=query_BXC.device)
    top_BZX, total_BZX = (torch.empty_like(sum_BZXV[..., 0]) for _ in range(2))
    out_BXV = query_BXC.new_empty(B, X, V)
    part_kernel[(blocks, most, B)](
        query_BXC, row_SC, page_BP, index_BK, visible_BQ, sum_BZXV, top_BZX, total_BZX,
        asked.scale, X, asked.heads, asked.queries, page_BP.stride(0), chosen,
        V=V, R=C - V, XB=tile.heads, BK=tile.slots, VP=padded(V), RP=padded(C - V) or 16,
        SIZE=asked.pages.page_size, num_warps=tile.warps, num_stages=tile.stages, **parts,
    )  # fmt: skip
    columns = min(SUM_COLUMNS, padded(V))
    sum_kernel[(X, triton.cdiv(V, columns), B)](
        sum_BZXV, top_BZX, total_BZX, visible_BQ, out_BXV, X, asked.queries, chosen,
        V=V, BK=tile.slots, BP=min(SUM_PARTS, most), BV=columns, **parts,
    )  # fmt: skip
    return out_BXV


def cut(programs: int) -> tuple[int, int]:
    """Parts of a long sequence and keys of a part when so many tiles of queries are asked at once.

    >>> cut(1), cut(8), cut(1000)
    ((128, 128), (32, 256), (8, 512))
    """
    least = next(keys for most, keys in LEAST if programs <= most)
    return min(MOST_PARTS, max(FEWEST_PARTS, triton.next_power_of_2(ENOUGH // programs))), least
