"""What the Hopper kernels of sparse latent attention share: layouts, lists of keys, copies.

A program owns M = 64 rows of queries: 64 heads of one query, or all heads of G neighbouring queries
that share one list of keys. A list holds words. With one query a word is a row, or -1. With more,
the G bits below the sign say which of the queries keep the row in the bits below them, and 0 is
nobody's.

V value columns of a row, R the columns after them, C = V + R. HP heads a query is rounded up to,
G = M / HP, BK = 64 keys of a tile, U slots of a list, N lists.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from torch.nn import functional as F
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from .problem import Problem
from .triton import counts, unions

# Two names that changed after Triton 3.6.
copy_rows = getattr(async_copy, "async_copy_global_to_shared", None)
if hasattr(async_copy, "async_load"):
    copy_rows = async_copy.async_load
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

LOG2_E = gl.constexpr(1.4426950408889634)
TILE = 64  # query rows of a program, and keys it visits at a time
M, BK = gl.constexpr(TILE), gl.constexpr(TILE)
# Tiles are visited in pairs; lists are padded so that the last pair is whole.
LIST_MULTIPLE = 128
# What a thread block may hold, and a margin for barriers, words and running maxima.
SHARED_BYTES, MARGIN_BYTES = 232_448, 3 << 10


@gluon.constexpr_function
def copy_layout(columns, warps):
    """Threads side by side along a row, 16 bytes each."""
    across = min(32, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def tile_layout(columns):
    """Shared memory that the matrix unit reads: as wide a swizzle as the columns allow."""
    return gl.NVMMASharedLayout(min(128, 2 * columns), 16, 2)


@gluon.constexpr_function
def product_layout(columns, groups):
    """64 rows by `columns`, the columns split over `groups` warpgroups."""
    return gl.NVMMADistributedLayout([3, 0], [4, groups], [16, min(256, columns // groups), 16])


@gluon.jit
def row_of(word, G: gl.constexpr):
    """Which row a slot names, and whether it names one."""
    if G > 1:
        return (word & ((1 << (31 - G)) - 1)).to(gl.int64), word != 0
    return gl.maximum(word, 0).to(gl.int64), word >= 0


@gluon.jit
def kept_by(word, row, HP: gl.constexpr):
    """[M, BK]: which of the program's query rows keep which slots."""
    G: gl.constexpr = M // HP
    word = gl.expand_dims(word, 0)
    if G > 1:
        return ((word >> (31 - G + gl.expand_dims(row, 1) // HP)) & 1) == 1
    return (word >= 0) & (gl.expand_dims(row, 1) >= 0)


@gluon.jit
def query_rows(first, block, T, H, HP: gl.constexpr, layout: gl.constexpr):
    """[M]: each row's place in [T, H], and whether there is such a query and head."""
    row = gl.arange(0, M, layout)
    t = first + row // HP
    head = block * HP + row % HP
    return t * H + head, (t < T) & (head < H)


@gluon.jit
def copy_queries(
    SOURCE, tile, first, block, T, H, stride: gl.constexpr, start: gl.constexpr, HP: gl.constexpr
):
    """Start copying columns of the program's query rows; rows there are none of become zeros."""
    columns: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = copy_layout(columns, gl.num_warps())
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    at, there = query_rows(first, block, T, H, HP, rows)
    column = gl.arange(0, columns, gl.SliceLayout(0, layout))
    source = SOURCE + gl.expand_dims(at * stride + start, 1) + gl.expand_dims(column, 0)
    copy_rows(tile, source, mask=gl.expand_dims(there, 1))


@gluon.jit
def gather(ROW, word, tile, start: gl.constexpr, C: gl.constexpr, G: gl.constexpr):
    """Start copying columns of the rows that `word` names into `tile`."""
    columns: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = copy_layout(columns, gl.num_warps())
    column = gl.arange(0, columns, gl.SliceLayout(0, layout))
    row, named = row_of(word, G)
    source = ROW + start + gl.expand_dims(row * C, 1) + gl.expand_dims(column, 0)
    copy_rows(tile, source, mask=gl.expand_dims(named, 1))


@gluon.jit
def write_rows(
    TARGET, x, first, block, T, H, stride: gl.constexpr, start: gl.constexpr, HP: gl.constexpr
):
    """Columns of the program's query rows to memory, those there are."""
    layout: gl.constexpr = x.type.layout
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    at, there = query_rows(first, block, T, H, HP, rows)
    column = gl.arange(0, x.type.shape[1], gl.SliceLayout(0, layout))
    target = TARGET + gl.expand_dims(at * stride + start, 1) + gl.expand_dims(column, 0)
    gl.store(target, x.to(TARGET.dtype.element_ty), mask=gl.expand_dims(there, 1))


@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """Which rows each program visits."""

    word_NU: Tensor
    count_N: Tensor  # slots to visit
    whole_N: Tensor  # leading ones that every query of the program keeps
    heads: int  # HP

    @classmethod
    def of(cls, problem: Problem, *, united: bool) -> "Lists":
        """One list a query, or one for as many neighbours as have 64 heads together."""
        index_TK = problem.index_TK
        H = problem.query_THC.shape[1]
        if united and H <= TILE // 2:
            heads = max(8, triton.next_power_of_2(H))
            word_NU, count_N = unions(index_TK, len(problem.row_SC), TILE // heads)
            return cls(word_NU, count_N, torch.zeros_like(count_N), heads)
        short = -index_TK.shape[1] % LIST_MULTIPLE
        if short:
            index_TK = F.pad(index_TK, (0, short), value=-1)
        return cls(index_TK, *counts(index_TK), TILE)

    def programs(self, problem: Problem) -> int:
        return len(self.count_N) * triton.cdiv(problem.query_THC.shape[1], self.heads)
