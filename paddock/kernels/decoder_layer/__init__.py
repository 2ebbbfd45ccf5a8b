"""A decoder layer in one call of the CPU kernels: latent (MLA, DSA) or grouped-query attention.

    run(weights, step, caches, x_TD) -> x_TD    after attention and MLP or experts

`weights` are addresses of packed weights; `step` all sequences of a packed step with their keys in
a paged KV cache. The new tokens are written to `caches`: KV entries and index keys, or keys and
values. Where a sequence has more than top-k keys, the layer's indexer selects, and layers without
one use the last selection of the step. Latent attention is absorbed.

The definition is the layer's modules, one after the other: the same kernels run, and results are
bitwise equal to theirs where they attend in the same form. What is saved is the time between two
kernels, most of a decode step of a small network. Not differentiable.

T tokens, D hidden, S slots, C latent KV width, B sequences, K selected keys.
"""

import ctypes
from collections.abc import Mapping
from ctypes import c_float, c_long, c_void_p
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from paddock.kernels import cpu
from paddock.kernels.block_table import BlockTable
from paddock.kernels.cpu.attention import CpuSequences

SIZES = (
    *("hidden", "heads", "nope", "rope", "value", "q_rank", "kv_rank"),
    *("index_heads", "index_dim", "topk", "inner", "experts", "active", "expert_inner"),
    *("interleaved", "index_interleaved", "normalize", "kv_heads", "head_dim", "window"),
)
SCALARS = ("eps", "q_eps", "kv_eps", "index_eps", "scale", "index_scale", "router_scale")
PLAIN = (
    *("attention_norm", "q_norm", "kv_norm", "index_norm", "index_bias"),
    *("qkv_bias", "o_bias", "mlp_norm", "key_up", "value_up"),
)
FP32 = ("index_weights", "router", "router_bias")
PACKED = (
    *("q_a", "q_b", "kv_a", "o", "index_query", "index_key", "qkv"),
    *("gate_up", "down", "expert_gate_up", "expert_down"),
)


class _Weights(ctypes.Structure):
    """`LayerWeights` in decoder_layer.h."""

    _fields_ = (
        *((name, c_long) for name in SIZES),
        *((name, c_float) for name in SCALARS),
        *((name, c_void_p) for name in (*PLAIN, *FP32, *PACKED)),
    )


class _Step(ctypes.Structure):
    """`LayerStep` in decoder_layer.h."""

    _fields_ = (
        ("tokens", c_long),
        ("sequences", c_long),
        *((name, c_void_p) for name in ("query", "queries", "keys", "page")),
        ("pages", c_long),
        ("page_size", c_long),
        *((name, c_void_p) for name in ("slot", "cos", "sin", "selected")),
    )


class LayerWeights:
    """Sizes and tensors of a layer, by the names above; what it does not have is left out."""

    def __init__(self, sizes: Mapping[str, float], tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._struct = _Weights(**sizes)
        self._addresses: list[int] = []
        self.dtype, self.packed_dtype = self._tensors["mlp_norm"].dtype, self._tensors["o"].dtype
        self.topk = int(sizes.get("topk", 0))

    @property
    def is_supported(self) -> bool:
        """Rankings in float32, everything else in one dtype, but for 8-bit weights, and in order
        in memory."""
        expected = {
            **dict.fromkeys(PLAIN, self.dtype),
            **dict.fromkeys(FP32, torch.float32),
            **dict.fromkeys(PACKED, self.packed_dtype),
        }
        return self.packed_dtype in (self.dtype, torch.int8) and all(
            x.dtype == expected[name] and x.is_contiguous() for name, x in self._tensors.items()
        )

    @property
    def address(self) -> int:
        """Of the struct; valid while self is and until a tensor gets other storage."""
        addresses = [x.data_ptr() for x in self._tensors.values()]
        if addresses != self._addresses:
            self._addresses = addresses
            for name, address in zip(self._tensors, addresses, strict=True):
                setattr(self._struct, name, address)
        return ctypes.addressof(self._struct)


@dataclass(frozen=True, eq=False)
class PagedStep:
    """All sequences of a step, the slots of its new tokens, and the most keys of a sequence."""

    sequences: CpuSequences
    slot_T: Tensor
    max_keys: int

    @classmethod
    def of(cls, sizes_3B: Tensor, pages: BlockTable, slot_T: Tensor) -> "PagedStep":
        """First query, queries and keys of each sequence, and its pages, all in 64 bits."""
        return cls(CpuSequences(sizes_3B, pages), slot_T, int(sizes_3B[2].max()))

    @cached_property
    def pairs(self) -> int:
        """Queries times keys, an upper bound of the pairs that attention multiplies."""
        return int((self.sequences.sizes_3B[1] * self.sequences.sizes_3B[2]).sum())

    def address(self, cos_TP: Tensor, sin_TP: Tensor, topk: int) -> int:
        """Of the struct, made once for all layers; valid while self and the angles are."""
        found = self.__dict__.get("_struct")
        if found is None:
            B, query, queries, keys, page, pages, page_size = self.sequences.arguments()
            T, selected_TK = len(self.slot_T), None
            if 0 < topk < self.max_keys:
                selected_TK = torch.empty(T, topk, dtype=torch.int32)
            found = self.__dict__["_struct"] = _Step(
                *(T, B, query, queries, keys, page, pages, page_size),
                *(self.slot_T.data_ptr(), cos_TP.data_ptr(), sin_TP.data_ptr()),
                None if selected_TK is None else selected_TK.data_ptr(),
            )
            self.__dict__["_kept"] = cos_TP, sin_TP, selected_TK
        return ctypes.addressof(found)


def run(
    weights: LayerWeights, step: int, caches: tuple[Tensor, Tensor | None], x_TD: Tensor
) -> Tensor:
    """`step` is the address of a step's struct."""
    out_TD = torch.empty_like(x_TD)
    first, second = caches
    cpu.function("decoder_layer", x_TD.dtype, weights.packed_dtype)(
        *(weights.address, step, first.data_ptr()),
        None if second is None else second.data_ptr(),
        *(x_TD.data_ptr(), out_TD.data_ptr()),
    )
    return out_TD


__all__ = ["LayerWeights", "PagedStep", "run"]
