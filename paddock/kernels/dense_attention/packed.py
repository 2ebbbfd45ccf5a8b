"""Kernel dispatch for packed documents on a GPU: one launch for all of them.

T queries and as many keys, H heads, D query/key dim, V value dim, K selected keys, W words of bits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paddock.kernels.dispatch import can_use_kernel
from paddock.kernels.spans import Span

# PyTorch prepares a launch for every new number and length of documents, which takes longer than
# the launch itself. It is still faster up to this many different lengths.
LENGTHS = 2
TILE = 128  # queries and keys per tile of the block mask


class LaunchConfig(NamedTuple):
    """Block sizes and launch options of a kernel."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class AttentionLaunchConfigs:
    """Launches for one head width: block sizes with few register spills and overlapping products
    (tests/kernels/test_dense_attention_compiled.py). With a mask, two stages read the tile list.
    """

    forward: LaunchConfig
    keys: LaunchConfig
    queries: LaunchConfig


MASKED_LAUNCHES = {
    64: AttentionLaunchConfigs(
        LaunchConfig(128, 32, 8, 5), LaunchConfig(32, 128, 8, 5), LaunchConfig(128, 64, 8, 5)
    ),
    128: AttentionLaunchConfigs(
        LaunchConfig(128, 64, 8, 5), LaunchConfig(64, 128, 8, 5), LaunchConfig(128, 64, 8, 5)
    ),
    256: AttentionLaunchConfigs(
        LaunchConfig(128, 32, 8, 4), LaunchConfig(32, 64, 8, 2), LaunchConfig(128, 32, 8, 2)
    ),
}
CAUSAL_LAUNCHES = {
    64: AttentionLaunchConfigs(
        LaunchConfig(128, 64, 8, 3), LaunchConfig(32, 128, 8, 3), LaunchConfig(128, 64, 8, 3)
    ),
    128: AttentionLaunchConfigs(
        LaunchConfig(128, 64, 8, 3), LaunchConfig(64, 128, 8, 3), LaunchConfig(128, 64, 8, 3)
    ),
    256: AttentionLaunchConfigs(
        LaunchConfig(128, 32, 8, 2), LaunchConfig(32, 64, 8, 2), LaunchConfig(128, 32, 8, 2)
    ),
}


def plan_for(width: int, *, masked: bool) -> AttentionLaunchConfigs:
    """Launches for this head width, the maximum over queries and values."""
    plans = MASKED_LAUNCHES if masked else CAUSAL_LAUNCHES
    return next(plan for max_width, plan in plans.items() if width <= max_width)


def suits(
    name: str, query_THD: Tensor, key_SGD: Tensor, value_SGV: Tensor, spans: Sequence[Span]
) -> bool:
    """Whether the kernel applies: half precision on a GPU, whole documents, packed contiguously."""
    return (
        can_use_kernel(name, query_THD, key_SGD, value_SGV)
        and query_THD.dtype == key_SGD.dtype == value_SGV.dtype
        and len(query_THD) > 0
        and max(query_THD.shape[-1], value_SGV.shape[-1]) <= max(MASKED_LAUNCHES)
        and _is_packed(tuple(spans), len(query_THD), len(key_SGD))
    )


@lru_cache(maxsize=16)
def _is_packed(spans: tuple[Span, ...], queries: int, keys: int) -> bool:
    start = 0
    for span in spans:
        if span.past or span.query != start or span.key != start:
            return False
        start += span.queries
    return start == queries == keys


def attention(
    query_THD: Tensor,
    key_SGD: Tensor,
    value_SGV: Tensor,
    spans: Sequence[Span],
    index_TK: Tensor | None,
    *,
    scale: float,
) -> Tensor:
    """dense_attention, or topk_masked_attention if there is an `index_TK`."""
    groups = query_THD.shape[1] // key_SGD.shape[1]
    if groups > 1:
        key_SGD = key_SGD.repeat_interleave(groups, dim=1)
        value_SGV = value_SGV.repeat_interleave(groups, dim=1)
    heads = (
        _with_contiguous_heads(query_THD),
        _with_contiguous_heads(key_SGD),
        _with_contiguous_heads(value_SGV),
    )
    kept = None if index_TK is None else KeyBlockMask.of(index_TK, tuple(spans))
    return _Attention.apply(*heads, kept, _Frame(tuple(spans), scale))  # type: ignore[no-any-return]


def _with_contiguous_heads(x: Tensor) -> Tensor:
    """Kernels take any row and head strides, but need a contiguous last dim."""
    return x if x.stride(-1) == 1 and x.stride(0) > 0 and x.stride(1) > 0 else x.contiguous()


@lru_cache(maxsize=64)
def table_of(
    spans: tuple[Span, ...], block: int, device: torch.device, longest_first: str = ""
) -> Tensor:
    """[blocks, 5] int32: document of each block (query, key, keys), start of the block in it, and
    first tile of the document. With `longest_first`, blocks with the most work come first: work
    grows ("queries") or shrinks ("keys") along a document. By default in the order of tiles.
    """
    rows, tile = [], 0
    for span in spans:
        starts = range(0, span.keys, block)
        rows += [(span.query, span.key, span.keys, start, tile) for start in starts]
        tile += -(-span.keys // TILE)
    if longest_first == "queries":
        rows.sort(key=lambda row: -row[3])
    elif longest_first == "keys":
        rows.sort(key=lambda row: row[3] - row[2])
    return torch.tensor(rows, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True, eq=False)
class KeyBlockMask:
    """Bit mask of the keys selected by each query, and which tiles have any."""

    words_TW: Tensor
    flags: Tensor  # [tiles, tiles of the longest document]
    lists: Tensor  # key tiles with a bit, for each query tile
    counts: Tensor

    @classmethod
    def of(cls, index_TK: Tensor, spans: tuple[Span, ...]) -> "KeyBlockMask":
        from . import triton as kernels

        index_TK = index_TK if index_TK.stride(-1) == 1 else index_TK.contiguous()
        T, K = index_TK.shape
        longest = max(span.keys for span in spans)
        # Whole tiles, and so rows of 16 bytes.
        words_TW = index_TK.new_zeros(T, -(-longest // TILE) * (TILE // 32), dtype=torch.int32)
        tiles = table_of(spans, TILE, index_TK.device)
        W, listed = words_TW.shape[1], -(-longest // TILE)
        kernels.keep[(len(tiles), TILE)](
            index_TK, words_TW, tiles, index_TK.stride(0), W, K,
            BK=_next_power_of_2(K), BW=min(_next_power_of_2(W), 1024), num_warps=4,
        )  # fmt: skip
        flags = words_TW.new_zeros(len(tiles), listed)
        grid = (len(tiles), listed)
        kernels.turn[grid](words_TW, words_TW, flags, tiles, W, listed, TURN=False)
        return cls(words_TW, flags, *_list_tiles(flags, tiles, by_keys=False))

    def turned(self, spans: tuple[Span, ...]) -> "KeyBlockMask":
        """The transposed mask: which queries select each key."""
        from . import triton as kernels

        tiles = table_of(spans, TILE, self.words_TW.device)
        words_SW = torch.zeros_like(self.words_TW)
        W, listed = words_SW.shape[1], self.flags.shape[1]
        grid = (len(tiles), listed)
        kernels.turn[grid](self.words_TW, words_SW, self.flags, tiles, W, listed, TURN=True)
        return KeyBlockMask(words_SW, self.flags, *_list_tiles(self.flags, tiles, by_keys=True))


def _list_tiles(flags: Tensor, tiles: Tensor, *, by_keys: bool) -> tuple[Tensor, Tensor]:
    from . import triton as kernels

    lists, counts = torch.empty_like(flags), flags.new_empty(len(flags))
    listed = flags.shape[1]
    kernels.name[(len(tiles),)](
        flags, lists, counts, tiles, listed, BY_KEYS=by_keys, BL=_next_power_of_2(listed)
    )
    return lists, counts


def _next_power_of_2(count: int) -> int:
    """The next power of two."""
    return 1 << max(0, count - 1).bit_length()


class _Frame(NamedTuple):
    """Arguments that are not tensors."""

    spans: tuple[Span, ...]
    scale: float


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kept: KeyBlockMask | None,
        frame: _Frame,
    ) -> Tensor:
        from . import triton as kernels

        (T, H, D), V, (spans, scale) = q.shape, v.shape[-1], frame
        out_THV = q.new_empty(T, H, V)
        slots = TILE * sum(-(-span.keys // TILE) for span in spans)
        lse_HS = torch.full((H, slots), math.inf, dtype=torch.float32, device=q.device)
        blocks = plan_for(max(D, V), masked=kept is not None).forward
        table = table_of(spans, blocks.queries, q.device, "queries")
        kernels.forward[(len(table), H)](
            q, k, v, out_THV, lse_HS, *_mask(kept, table),
            scale * math.log2(math.e), *_strides(q, k, v, out_THV),
            slots, *_sizes(kept), **_shape(q, v, kept, blocks),
        )  # fmt: skip
        masks = () if kept is None else (kept.words_TW, kept.flags, kept.lists, kept.counts)
        ctx.save_for_backward(q, k, v, out_THV, lse_HS, *masks)
        ctx.frame = frame
        return out_THV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THV: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out_THV, lse_HS, *masks = ctx.saved_tensors
        kept = KeyBlockMask(*masks) if masks else None
        grad_THV = _with_contiguous_heads(grad_THV)
        spans, scale = ctx.frame
        delta_HS = _delta(out_THV, grad_THV, spans, lse_HS)
        inputs = _Backward(q, k, v, grad_THV, lse_HS, delta_HS, spans, scale)
        dq_THD = inputs.queries(kept) if ctx.needs_input_grad[0] else None
        dk_SHD, dv_SHV = None, None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dk_SHD, dv_SHV = inputs.keys(None if kept is None else kept.turned(spans))
        return dq_THD, dk_SHD, dv_SHV, None, None


def _delta(out_THV: Tensor, grad_THV: Tensor, spans: tuple[Span, ...], lse_HS: Tensor) -> Tensor:
    from . import triton as kernels

    (_, H, V), delta_HS = out_THV.shape, torch.zeros_like(lse_HS)
    table = table_of(spans, TILE, out_THV.device)
    kernels.delta[(len(table), H)](
        out_THV, grad_THV, delta_HS, table, *_strides(out_THV, grad_THV), lse_HS.shape[1],
        V=V, BV=_width(V), BM=TILE, num_warps=8,
    )  # fmt: skip
    return delta_HS


class _Backward(NamedTuple):
    """Inputs of both backward kernels."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_THV: Tensor
    lse_HS: Tensor
    delta_HS: Tensor
    spans: tuple[Span, ...]
    scale: float

    def plan(self, kept: KeyBlockMask | None) -> AttentionLaunchConfigs:
        width = max(self.q.shape[-1], self.v.shape[-1])
        return plan_for(width, masked=kept is not None)

    def queries(self, kept: KeyBlockMask | None) -> Tensor:
        from . import triton as kernels

        q, k, v, grad_THV, lse_HS, delta_HS, spans, scale = self
        dq_THD = torch.empty_like(q, memory_format=torch.contiguous_format)
        blocks = self.plan(kept).queries
        table = table_of(spans, blocks.queries, q.device, "queries")
        kernels.backward_queries[(len(table), q.shape[1])](
            q, k, v, grad_THV, lse_HS, delta_HS, dq_THD, *_mask(kept, table),
            scale, scale * math.log2(math.e), *_strides(q, k, v, grad_THV, dq_THD),
            lse_HS.shape[1], *_sizes(kept), **_shape(q, v, kept, blocks),
        )  # fmt: skip
        return dq_THD

    def keys(self, kept: KeyBlockMask | None) -> tuple[Tensor, Tensor]:
        """`kept` is the transposed mask."""
        from . import triton as kernels

        q, k, v, grad_THV, lse_HS, delta_HS, spans, scale = self
        dk_SHD = torch.empty_like(k, memory_format=torch.contiguous_format)
        dv_SHV = torch.empty_like(v, memory_format=torch.contiguous_format)
        blocks = self.plan(kept).keys
        table = table_of(spans, blocks.keys, q.device, "keys")
        kernels.backward_keys[(len(table), q.shape[1])](
            q, k, v, grad_THV, lse_HS, delta_HS, dk_SHD, dv_SHV, *_mask(kept, table),
            scale, scale * math.log2(math.e), *_strides(q, k, v, grad_THV, dk_SHD, dv_SHV),
            lse_HS.shape[1], *_sizes(kept), **_shape(q, v, kept, blocks),
        )  # fmt: skip
        return dk_SHD, dv_SHV


def _mask(kept: KeyBlockMask | None, table: Tensor) -> tuple[Tensor, ...]:
    """Words, lists, counts and the table; without a mask the first three are never read."""
    return (table,) * 4 if kept is None else (kept.words_TW, kept.lists, kept.counts, table)


def _sizes(kept: KeyBlockMask | None) -> tuple[int, int]:
    return (0, 0) if kept is None else (kept.words_TW.shape[1], kept.lists.shape[1])


def _strides(*tensors: Tensor) -> list[int]:
    """Strides of rows and heads."""
    return [stride for x in tensors for stride in x.stride()[:2]]


def _shape(q: Tensor, v: Tensor, kept: KeyBlockMask | None, blocks: LaunchConfig) -> dict[str, Any]:
    D, V = q.shape[-1], v.shape[-1]
    return {
        "MASKED": kept is not None,
        "D": D,
        "V": V,
        "BD": _width(D),
        "BV": _width(V),
        "BM": blocks.queries,
        "BN": blocks.keys,
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
    }


def _width(dim: int) -> int:
    """Columns of a block that holds `dim`; tensor cores need at least 16."""
    return max(16, _next_power_of_2(dim))
