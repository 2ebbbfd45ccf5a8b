"""The cache itself: one storage a layer and stream, all of them under the same slots.

Slot s is place s % page_tokens of page s // page_tokens. T new tokens, S slots, B sequences,
Q queries of each, P pages of the longest.
"""

import numpy as np
import torch
from torch import Tensor

from paddock.engine.settings import KVCacheConfig
from paddock.kernels.block_table import BlockTable
from paddock.kernels.spans import Span
from paddock.model import AttentionMetadata, DecodeBatch, ModelConfig, cost

RecurrentStates = dict[tuple[int, str], Tensor]  # of one sequence's recurrent layers


class PagedKVCache:
    """Storage for every cached layer, and which pages each seat's sequence has."""

    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        capacity: KVCacheConfig,
        seats: int,
        *,
        like: Tensor,
    ) -> None:
        self.capacity = capacity
        self.device = like.device
        # Zeros, not garbage: what lies behind a sequence's end is multiplied by zero, and zero
        # times NaN is not zero.
        self.storage: dict[tuple[int, str], Tensor] = {
            (layer, stream): like.new_zeros(capacity.tokens, *shape)
            for layer in layers
            for stream, shape in cost.kv_cache_shapes(config, layer).items()
        }
        self._pages = np.zeros((seats, capacity.pages_per_sequence), dtype=np.int64)
        self._offsets = np.arange(capacity.page_size)

    @property
    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.storage.values())

    def set_block_table(self, seat: int, pages: list[int], start: int = 0) -> None:
        """Tell which pages the sequence on this seat has, from its page `start` on."""
        self._pages[seat, start : start + len(pages)] = pages

    def slot_mapping(self, seat: int, start: int, stop: int) -> np.ndarray:
        """Where tokens [start, stop) of a sequence lie."""
        size = self.capacity.page_size
        first, last = start // size, -(-stop // size)
        slots = self._pages[seat, first:last, None] * size + self._offsets
        return slots.reshape(-1)[start - first * size : stop - first * size]

    def zero_pages(self, pages: list[int]) -> None:
        slots = np.add.outer(
            np.array(pages, dtype=np.int64) * self.capacity.page_size, self._offsets
        )
        slot_S = torch.from_numpy(slots.reshape(-1)).to(self.device)
        for storage in self.storage.values():
            storage[slot_S] = 0

    def block_table(self, seats: np.ndarray, longest: int) -> np.ndarray:
        """[B, P] the pages of every sequence, enough for the longest."""
        return self._pages[seats, : -(-longest // self.capacity.page_size)]

    def slot_mapping_at(self, page_BP: np.ndarray, position_BQ: np.ndarray) -> np.ndarray:
        """[B, Q] the slots of some tokens of sequences with these pages."""
        size = self.capacity.page_size
        page_BQ = np.take_along_axis(page_BP, position_BQ // size, 1)
        return page_BQ * size + position_BQ % size


class PrefillChunks:
    """The loose part of a step as it is put together: runs of tokens that are read."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.slots: list[np.ndarray] = []
        self.new: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.tokens = self.keys = 0

    def add(self, slots: np.ndarray, start: int) -> None:
        """Tokens [start, len(slots)) are new."""
        stop = len(slots)
        self.spans.append(Span(self.tokens, stop - start, self.keys, stop))
        self.slots.append(slots)
        self.new.append(slots[start:])
        self.positions.append(np.arange(start, stop))
        self.tokens += stop - start
        self.keys += stop


def build_attention_metadata(
    cache: PagedKVCache, chunks: PrefillChunks, seats: np.ndarray, past_B: np.ndarray, queries: int
) -> tuple[AttentionMetadata, Tensor]:
    """The layout of a step, chunks first and then a batch of `queries` tokens for each seat, behind
    `past_B` tokens; and the slots of its new tokens."""
    spans, slots = list(chunks.spans), list(chunks.slots)
    new, positions, batch = list(chunks.new), list(chunks.positions), None
    if len(seats):
        position_BQ = past_B[:, None] + np.arange(queries)
        page_BP = cache.block_table(seats, int(past_B.max()) + queries)
        for b, past in enumerate(past_B.tolist()):
            spans.append(Span(chunks.tokens + b * queries, queries, 0, past + queries))
        new.append(cache.slot_mapping_at(page_BP, position_BQ).reshape(-1))
        positions.append(position_BQ.reshape(-1))
        visible_BQ = copy_to_device_async((position_BQ + 1).astype(np.int32), cache.device)
        pages = BlockTable(copy_to_device_async(page_BP, cache.device), cache.capacity.page_size)
        batch = DecodeBatch(pages, visible_BQ)
    layout = AttentionMetadata(
        _tensor(positions, cache.device),
        tuple(spans),
        kv_slot_S=_tensor(slots, cache.device) if slots else None,
        decode_batch=batch,
    )
    return layout, _tensor(new, cache.device)


def _tensor(pieces: list[np.ndarray], device: torch.device) -> Tensor:
    return copy_to_device_async(pieces[0] if len(pieces) == 1 else np.concatenate(pieces), device)


def copy_to_device_async(values: np.ndarray, device: torch.device) -> Tensor:
    """On its way to the device; nobody waits for it to arrive."""
    here = torch.from_numpy(values)
    if device.type != "cuda":
        return here.to(device)
    return here.pin_memory().to(device, non_blocking=True)


class PagedKVCacheView:
    """The cache as one step's layers see it (see model.memory.Memory)."""

    def __init__(self, cache: PagedKVCache, slot_T: Tensor, states: list[RecurrentStates]) -> None:
        self._storage, self._slot_T, self._states = cache.storage, slot_T, states

    def update(self, layer: int, stream: str, rows_T: Tensor) -> Tensor:
        return self._storage[layer, stream].index_copy_(0, self._slot_T, rows_T)

    def slot_mapping(self, layer: int, stream: str) -> tuple[Tensor, Tensor]:
        """The storage and the slots of the new tokens, for who writes there himself."""
        return self._storage[layer, stream], self._slot_T

    def load_state(self, layer: int, stream: str, span: int) -> Tensor | None:
        return self._states[span].get((layer, stream))

    def store_state(self, layer: int, stream: str, span: int, state: Tensor) -> None:
        self._states[span][layer, stream] = state
