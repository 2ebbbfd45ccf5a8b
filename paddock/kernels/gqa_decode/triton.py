"""Grouped attention of few queries, its keys cut into parts that many programs share.

A program holds a tile of XB rows, row x being query x // GROUP and head x % GROUP of those that
share a key head; what is left of XB holds nothing. It attends to one part of the tile's keys and
leaves an unfinished sum, which the second kernel of latent_decode adds to the others; where nobody
has more than one part, it is finished at once. Tiles are found by counting, Q queries of every
sequence with keys in pages, or (TABLE) in a table of `tiles`, with keys that lie side by side. The
grid of the first depends on no length, so a graph may hold it.

N queries, H heads, G key heads, D query/key dim, V value dim, S rows of storage; DP and VP are D
and V rounded up to a power of two, BK keys of a step.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paddock.kernels.block_table import BlockTable
from paddock.kernels.dense_attention.triton import softmax_step
from paddock.kernels.mla_decode.triton import (
    SUM_COLUMNS,
    SUM_PARTS,
    columns,
    cut,
    part_keys,
    sum_kernel,
)
from paddock.kernels.sparse_mla.triton import LOG2_E, LOWEST, ROOM_TO_SHARE, load_columns, padded

from .tiles import LEAST, MIDDLE, SMALL, TileSchedule

FIELDS = tl.constexpr(5)  # of a tile in a table


@triton.jit
def _listed(TABLE, tile):
    """A tile of the table: first query, first row of answers, first key, queries, what the first
    query sees."""
    at = TABLE + tile * FIELDS
    query0, out0 = tl.load(at).to(tl.int64), tl.load(at + 1).to(tl.int64)
    return query0, out0, tl.load(at + 2).to(tl.int64), tl.load(at + 3), tl.load(at + 4)


# Longer than functions here may be: two ways to find a tile and its keys, one way to attend.
@triton.jit(do_not_specialize=["queries", "pages"])
def part_kernel(  # noqa: PLR0915
    QUERY, KEY, VALUE, PAGE, VISIBLE, TABLE, OUT, SUM, TOP, TOTAL, COUNT,
    scale, groups, queries, pages, q_row, q_head, k_row, k_head, v_row, v_head,
    GROUP: tl.constexpr, D: tl.constexpr, V: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr,
    WINDOW: tl.constexpr, XB: tl.constexpr, BK: tl.constexpr, SIZE: tl.constexpr,
    PARTS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    tile, g, part = tl.program_id(0) // groups, tl.program_id(0) % groups, tl.program_id(1)
    most: tl.constexpr = XB // GROUP
    x = tl.arange(0, XB)
    q = x // GROUP
    if TABLE is None:
        tiles = tl.cdiv(queries, most)
        b = (tile // tiles).to(tl.int64)
        query0 = b * queries + tile % tiles * most
        out0 = query0
        mine = q < tl.minimum(queries - tile % tiles * most, most)
        visible = tl.load(VISIBLE + query0 + q, mask=mine, other=0).to(tl.int32)
        page_row = PAGE + b * pages
    else:
        query0, out0, key0, count, seen = _listed(TABLE, tile)
        mine = q < count
        visible = tl.where(mine, seen + q, 0)
    last = tl.max(visible, 0)
    first = 0
    if WINDOW is not None:
        first = tl.maximum(tl.min(tl.where(mine, visible, last), 0) - WINDOW, 0)
    keys = part_keys(last - first, PARTS, LEAST, BK)
    begin = first + part * keys
    end = tl.minimum(begin + keys, last)
    if begin < end:
        head = g * GROUP + x % GROUP
        at_query = QUERY + ((query0 + q) * q_row + head * q_head)[:, None]
        query = load_columns(at_query, D, DP, mine[:, None])
        top = tl.full([XB], LOWEST, tl.float32)
        total = tl.zeros([XB], tl.float32)
        acc = tl.zeros([XB, VP], tl.float32)
        for start in range(begin, end, BK):
            at = start + tl.arange(0, BK)
            # Where there is no key, one that is there is read: loads need no mask.
            here = tl.minimum(at, end - 1)
            if TABLE is None:
                slot = tl.load(page_row + here // SIZE).to(tl.int64) * SIZE + here % SIZE
            else:
                slot = key0 + here
            key = columns(KEY + (slot * k_row + g * k_head)[:, None], D, DP)
            score = tl.dot(query, tl.trans(key), input_precision="ieee")
            seen_xk = at[None, :] < tl.minimum(visible, end)[:, None]
            if WINDOW is not None:
                seen_xk = seen_xk & (at[None, :] >= (visible - WINDOW)[:, None])
            score = tl.where(seen_xk, score, float("-inf"))
            value = columns(VALUE + (slot * v_row + g * v_head)[:, None], V, VP)
            top, total, acc = softmax_step(top, total, acc, score, value, scale * LOG2_E)
        column = tl.arange(0, VP)[None, :]
        kept = mine[:, None] & (column < V)
        heads = groups * GROUP
        row = out0 + q
        if PARTS == 1:
            out = OUT + (row * heads + head)[:, None] * V + column
            tl.store(out, (acc / total[:, None]).to(OUT.dtype.element_ty), mask=kept)
        else:
            at_sum = (row * PARTS + part) * heads + head
            tl.store(SUM + at_sum[:, None] * V + column, acc, mask=kept)
            tl.store(TOP + at_sum, top, mask=mine)
            tl.store(TOTAL + at_sum, total, mask=mine)
            # How many parts there are to add, the second kernel finds as this one does.
            tl.store(COUNT + row, last - first, mask=mine & (head + part == 0))


class Heads(NamedTuple):
    """What attends to what, and how."""

    query_NHD: Tensor
    key_SGD: Tensor
    value_SGV: Tensor
    scale: float
    window: int | None

    @property
    def groups(self) -> int:
        return self.key_SGD.shape[1]

    @property
    def group(self) -> int:
        return self.query_NHD.shape[1] // self.groups

    @property
    def width(self) -> int:
        return max(padded(self.query_NHD.shape[-1]), padded(self.value_SGV.shape[-1]))


class Cut(NamedTuple):
    """Rows of a tile, and parts of the longest one's keys with so many keys at least."""

    rows: int
    parts: int
    least: int


def decode(heads: Heads, pages: BlockTable, visible_BQ: Tensor) -> Tensor:
    """[N, H, V]: the queries of a batch, sequence by sequence."""
    (B, Q), (N, H, _) = visible_BQ.shape, heads.query_NHD.shape
    rows = min(max(SMALL, triton.next_power_of_2(Q * heads.group)), MIDDLE)
    tiles = B * triton.cdiv(Q, rows // heads.group)
    most, least = cut(tiles * heads.groups)
    room = pages.max_keys if heads.window is None else min(pages.max_keys, heads.window + Q - 1)
    most = min(most, triton.next_power_of_2(triton.cdiv(room, least)))
    out_NHV = heads.query_NHD.new_empty(N, H, heads.value_SGV.shape[-1])
    assert pages.page_BP.stride(1) == 1
    where = {
        "PAGE": pages.page_BP, "VISIBLE": visible_BQ.contiguous(), "TABLE": None, "queries": Q,
        "pages": pages.page_BP.stride(0), "SIZE": pages.page_size,
    }  # fmt: skip
    _attend(heads, tiles, Cut(rows, most, least), where, out_NHV)
    return out_NHV


def read(heads: Heads, plan: TileSchedule, out_NHV: Tensor) -> None:
    """The answers of a plan's tiles."""
    where = {
        "PAGE": None, "VISIBLE": None, "TABLE": plan.table, "queries": 0, "pages": 0, "SIZE": 1,
    }  # fmt: skip
    _attend(heads, len(plan.table), Cut(plan.rows, plan.parts, LEAST), where, out_NHV)


def _attend(heads: Heads, tiles: int, cut: Cut, where: dict, out_NHV: Tensor) -> None:
    query_NHD, key_SGD, value_SGV, scale, window = heads
    query_NHD = query_NHD if query_NHD.stride(-1) == 1 else query_NHD.contiguous()
    (N, H, V), D = out_NHV.shape, query_NHD.shape[-1]
    paged, shared_bytes = where["TABLE"] is None, _shared_bytes(out_NHV.device)
    blocks = Blocks.of(cut.rows, heads.width, paged=paged, shared_bytes=shared_bytes)
    parts = {"PARTS": cut.parts, "LEAST": cut.least, "BK": blocks.keys}
    sums = (out_NHV, out_NHV, out_NHV, out_NHV)  # not looked at
    if cut.parts > 1:
        sum_NZHV = torch.empty(N, cut.parts, H, V, dtype=torch.float32, device=out_NHV.device)
        top_NZH, total_NZH = (torch.empty_like(sum_NZHV[..., 0]) for _ in range(2))
        # Rows that are in no tile of a table have no parts.
        filled = torch.empty if paged else torch.zeros
        sums = (sum_NZHV, top_NZH, total_NZH, filled(N, dtype=torch.int32, device=out_NHV.device))
    SUM, TOP, TOTAL, COUNT = sums
    part_kernel[(tiles * heads.groups, cut.parts)](
        query_NHD, key_SGD, value_SGV, OUT=out_NHV, SUM=SUM, TOP=TOP, TOTAL=TOTAL, COUNT=COUNT,
        scale=scale, groups=heads.groups, q_row=query_NHD.stride(0), q_head=query_NHD.stride(1),
        k_row=key_SGD.stride(0), k_head=key_SGD.stride(1),
        v_row=value_SGV.stride(0), v_head=value_SGV.stride(1),
        GROUP=heads.group, D=D, V=V, DP=padded(D), VP=padded(V), WINDOW=window, XB=cut.rows,
        **where, **parts, num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    if cut.parts > 1:
        wide = min(SUM_COLUMNS, padded(V))
        sum_kernel[(H, triton.cdiv(V, wide), N)](
            SUM, TOP, TOTAL, COUNT, out_NHV, H, 1, 0,
            V=V, BP=min(SUM_PARTS, cut.parts), BV=wide, **parts,
        )  # fmt: skip


class Blocks(NamedTuple):
    """How a tile's keys are walked over."""

    keys: int
    warps: int
    stages: int

    @classmethod
    def of(cls, rows: int, width: int, *, paged: bool, shared_bytes: int) -> "Blocks":
        """Small tiles wait for keys and want many on their way; large ones multiply and want their
        sums in registers. Looking up a page takes every other stage.

        >>> Blocks.of(16, 64, paged=True, shared_bytes=232_448)
        Blocks(keys=128, warps=4, stages=5)
        """
        keys = 32 if width > 128 else 128 if width <= 64 and rows < MIDDLE else 64
        warps = 8 if rows > MIDDLE or rows * width > MIDDLE * 128 else 4
        ahead = 2 if shared_bytes >= ROOM_TO_SHARE else 1
        return cls(keys, warps, 2 * ahead + 1 if paged else ahead + 1)


def _shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0)
