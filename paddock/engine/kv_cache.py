"""Paged KV cache: one tensor per layer and stream, all indexed by the same KV slots.

KV slot s is position s % page_size of page s // page_size. `slot` alone is a sequence's row in the
block table. T new tokens, S KV slots, B sequences, Q queries of each, P pages of the longest.
"""

import math

import numpy as np
import torch
from torch import Tensor

from paddock.engine.settings import KVCacheConfig
from paddock.kernels import cpu
from paddock.kernels.block_table import BlockTable
from paddock.kernels.decoder_layer import PagedStep
from paddock.kernels.spans import Span
from paddock.model import AttentionMetadata, DecodeBatch, ModelConfig, cost

# (layer, stream) -> state of one sequence's linear-attention layers.
RecurrentStates = dict[tuple[int, str], Tensor]


class PagedKVCache:
    """KV storage of every cached layer, and the block table of every slot."""

    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        capacity: KVCacheConfig,
        slots: int,
        *,
        like: Tensor,
    ) -> None:
        self.capacity = capacity
        self.device = like.device
        # Zeros, not empty: entries behind a sequence's end are multiplied by zero, and zero times
        # NaN is NaN.
        self.storage: dict[tuple[int, str], Tensor] = {
            (layer, stream): _zeros(capacity.tokens, *shape, like=like)
            for layer in layers
            for stream, shape in cost.kv_cache_shapes(config, layer).items()
        }
        self._pages = np.zeros((slots, capacity.pages_per_sequence), dtype=np.int64)
        self._offsets = np.arange(capacity.page_size)

    @property
    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.storage.values())

    def set_block_table(self, slot: int, pages: list[int], start: int = 0) -> None:
        """Set the pages of the sequence in this slot, from its page `start` on."""
        self._pages[slot, start : start + len(pages)] = pages

    def slot_mapping(self, slot: int, start: int, stop: int) -> np.ndarray:
        """The KV slots of tokens [start, stop) of the sequence in this slot."""
        size = self.capacity.page_size
        first, last = start // size, -(-stop // size)
        kv_slots = self._pages[slot, first:last, None] * size + self._offsets
        return kv_slots.reshape(-1)[start - first * size : stop - first * size]

    def zero_pages(self, pages: list[int]) -> None:
        """Overwrite all entries of these pages with zeros."""
        kv_slots = np.add.outer(
            np.array(pages, dtype=np.int64) * self.capacity.page_size, self._offsets
        )
        kv_slot_S = torch.from_numpy(kv_slots.reshape(-1)).to(self.device)
        for storage in self.storage.values():
            storage[kv_slot_S] = 0

    def block_table(self, slots: np.ndarray, max_len: int) -> np.ndarray:
        """[B, P] the pages of these slots, enough for `max_len` tokens."""
        return self._pages[slots, : -(-max_len // self.capacity.page_size)]

    def slot_mapping_at(self, page_BP: np.ndarray, position_BQ: np.ndarray) -> np.ndarray:
        """[B, Q] the KV slots of given positions in sequences with these pages."""
        size = self.capacity.page_size
        page_BQ = np.take_along_axis(page_BP, position_BQ // size, 1)
        return page_BQ * size + position_BQ % size


def _zeros(*shape: int, like: Tensor) -> Tensor:
    """On a CPU memory is taken only when it is first written to: a large cache costs what is used
    of it."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    bytes_N = np.zeros(math.prod(shape) * like.element_size(), dtype=np.uint8)  # by calloc
    return torch.from_numpy(bytes_N).view(like.dtype).view(shape)


class PrefillChunks:
    """The sequences of a step outside the decode batch: chunked prefill, as spans."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.spans: list[Span] = []
        self.kv_slots: list[np.ndarray] = []
        self.new: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.tokens = self.keys = 0

    def add(self, slot: int, kv_slots: np.ndarray, start: int) -> None:
        """Add a sequence with these KV slots; its tokens from `start` on are new."""
        stop = len(kv_slots)
        self.slots.append(slot)
        self.spans.append(Span(self.tokens, stop - start, self.keys, stop))
        self.kv_slots.append(kv_slots)
        self.new.append(kv_slots[start:])
        self.positions.append(np.arange(start, stop))
        self.tokens += stop - start
        self.keys += stop


def build_attention_metadata(
    cache: PagedKVCache, chunks: PrefillChunks, slots: np.ndarray, past_B: np.ndarray, queries: int
) -> tuple[AttentionMetadata, Tensor]:
    """Attention metadata of a step and the KV slots of its new tokens: the prefill chunks first,
    then a decode batch of `queries` tokens for each slot, after `past_B` tokens."""
    spans, kv_slots = list(chunks.spans), list(chunks.kv_slots)
    new, positions, batch = list(chunks.new), list(chunks.positions), None
    if len(slots):
        position_BQ = past_B[:, None] + np.arange(queries)
        page_BP = cache.block_table(slots, int(past_B.max()) + queries)
        for b, past in enumerate(past_B.tolist()):
            spans.append(Span(chunks.tokens + b * queries, queries, 0, past + queries))
        new.append(cache.slot_mapping_at(page_BP, position_BQ).reshape(-1))
        positions.append(position_BQ.reshape(-1))
        visible_BQ = copy_to_device_async((position_BQ + 1).astype(np.int32), cache.device)
        pages = BlockTable(copy_to_device_async(page_BP, cache.device), cache.capacity.page_size)
        batch = DecodeBatch(pages, visible_BQ)
    kv_slot_T = _tensor(new, cache.device)
    layout = AttentionMetadata(
        _tensor(positions, cache.device),
        tuple(spans),
        kv_slot_S=_tensor(kv_slots, cache.device) if kv_slots else None,
        decode_batch=batch,
        paged_step=_paged_step(cache, chunks, slots, past_B + queries, queries, kv_slot_T),
    )
    return layout, kv_slot_T


def _paged_step(
    cache: PagedKVCache,
    chunks: PrefillChunks,
    slots: np.ndarray,
    keys_B: np.ndarray,
    queries: int,
    kv_slot_T: Tensor,
) -> PagedStep | None:
    """The step for packed layers; None where they do not run."""
    if cache.device.type != "cpu" or not cpu.is_loaded():
        return None
    queries_B = np.full(len(slots), queries)
    if chunks.spans:
        slots = np.concatenate((chunks.slots, slots))
        keys_B = np.concatenate(([span.keys for span in chunks.spans], keys_B))
        queries_B = np.concatenate(([span.queries for span in chunks.spans], queries_B))
    first_B = np.cumsum(queries_B) - queries_B
    page_BP = cache.block_table(slots, int(keys_B.max()))
    sizes_3B = torch.from_numpy(np.stack((first_B, queries_B, keys_B)))
    pages = BlockTable(torch.from_numpy(page_BP), cache.capacity.page_size)
    return PagedStep.of(sizes_3B, pages, kv_slot_T)


def _tensor(pieces: list[np.ndarray], device: torch.device) -> Tensor:
    return copy_to_device_async(pieces[0] if len(pieces) == 1 else np.concatenate(pieces), device)


def copy_to_device_async(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy to the device without synchronizing: through pinned memory on CUDA."""
    host = torch.from_numpy(values)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


class PagedKVCacheView:
    """The KV cache as the layers of one step see it (implements model.KVCache)."""

    def __init__(
        self, cache: PagedKVCache, kv_slot_T: Tensor, states: list[RecurrentStates]
    ) -> None:
        self._storage, self._kv_slot_T, self._states = cache.storage, kv_slot_T, states

    def update(self, layer: int, stream: str, rows_T: Tensor) -> Tensor:
        return self._storage[layer, stream].index_copy_(0, self._kv_slot_T, rows_T)

    def storage_and_slots(self, layer: int, stream: str) -> tuple[Tensor, Tensor]:
        """The storage and the KV slots of the new tokens, for kernels that write in place."""
        return self._storage[layer, stream], self._kv_slot_T

    def load_state(self, layer: int, stream: str, span: int) -> Tensor | None:
        return self._states[span].get((layer, stream))

    def store_state(self, layer: int, stream: str, span: int, state: Tensor) -> None:
        self._states[span][layer, stream] = state
