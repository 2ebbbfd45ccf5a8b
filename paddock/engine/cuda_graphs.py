"""CUDA graphs: decode steps are captured once per batch size and then replayed.

A batch is padded to the next power of two by repeating its first sequence: the copies compute the
same values, select the same experts and write the same KV entries to the same KV slots. The number
of pages per sequence is padded to a power of two as well. Capture is lazy: a graph is captured when
its size first occurs.

N tokens of a step: B sequences with Q each; P pages per sequence; D hidden, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paddock.config import ConfigError
from paddock.engine.async_step import FutureTokens
from paddock.engine.kv_cache import PagedKVCache, PagedKVCacheView, copy_to_device_async
from paddock.engine.settings import EngineSettings
from paddock.kernels.block_table import BlockTable
from paddock.kernels.cuda_graphs import CapturedGraph, CudaGraphPool, can_capture
from paddock.kernels.dispatch import has_triton
from paddock.kernels.spans import Span
from paddock.model import (
    AttentionMetadata,
    AuxRequest,
    DecodeBatch,
    ForwardContext,
    ModelConfig,
    Transformer,
    rotary_cos_sin,
)
from paddock.model import (
    config as model_config,
)

MIN_KEYS = 1024  # smallest key capacity of a graph, for models without an indexer


@dataclass(frozen=True, slots=True)
class CudaGraphKey:
    """The padded size that a graph was captured for."""

    sequences: int
    query_len: int
    pages: int


@dataclass(frozen=True, slots=True, eq=False)
class UniformDecodeBatch:
    """A decode batch with equal query lengths: slots, past lengths and new tokens each."""

    slot_B: np.ndarray
    past_len_B: np.ndarray
    query_len: int

    @property
    def tokens(self) -> int:
        return len(self.slot_B) * self.query_len

    @property
    def max_len(self) -> int:
        return int(self.past_len_B.max()) + self.query_len

    def padded_to(self, sequences: int) -> "UniformDecodeBatch":
        """Pad the batch with copies of its first sequence."""
        missing = sequences - len(self.slot_B)
        slot_B, past_B = (
            np.concatenate((x, np.repeat(x[:1], missing))) for x in (self.slot_B, self.past_len_B)
        )
        return UniformDecodeBatch(slot_B, past_B, self.query_len)


@dataclass(slots=True, eq=False)
class CudaGraphBuffers:
    """Static input buffers of the graphs of one size."""

    number_I: Tensor  # int32: tokens, positions, KV slots, visible keys, pages
    hidden_ND: Tensor  # hidden states for the MTP pass
    size: CudaGraphKey
    captured: dict[str, CapturedGraph[tuple[Tensor, Tensor | None]]] = field(default_factory=dict)

    @property
    def views(self) -> tuple[Tensor, ...]:
        N = self.size.sequences * self.size.query_len
        return self.number_I.split([N, N, N, N, self.size.sequences * self.size.pages])

    def put_tokens(self, token_n: Tensor) -> None:
        copy_padded(self.views[0], token_n)


def copy_padded(buffer_N: Tensor, rows_n: Tensor) -> None:
    """Copy rows into a buffer, padded with copies of the first row."""
    n = len(rows_n)
    buffer_N[:n].copy_(rows_n, non_blocking=True)
    if n < len(buffer_N):
        buffer_N[n:] = rows_n[:1].to(buffer_N)


class CudaGraphRunner:
    """Captures and replays decode, MTP and draft passes."""

    def __init__(self, network: Transformer, cache: PagedKVCache, settings: EngineSettings) -> None:
        self.network, self.cache, self.settings = network, cache, settings
        self._inputs: dict[CudaGraphKey, CudaGraphBuffers] = {}
        self._pool = CudaGraphPool(cache.device)
        self._addresses = parameter_addresses(network)
        self._recheck_needed = False  # weights may have moved
        config, capacity = network.config, cache.capacity
        position_S = torch.arange(
            capacity.context_length + capacity.lookahead_slots, device=cache.device
        )
        self._cos_SP, self._sin_SP = rotary_cos_sin(position_S, config.rope, network.rope_dim)

    @classmethod
    def create_if_supported(
        cls, network: Transformer, cache: PagedKVCache, settings: EngineSettings
    ) -> "CudaGraphRunner | None":
        """A runner, or None if graphs are disabled or unsupported: linear-attention layers, routing
        capture, or weights other than bfloat16 (whose kernels synchronize with the host)."""
        dtype, capturable = network.dtype, can_capture(cache.device)
        supported = dtype == torch.bfloat16 and has_triton()
        if settings.cuda_graphs and capturable and not supported:
            raise ConfigError(f"'cuda_graphs' needs Triton and bfloat16 weights, got {dtype}")
        enabled = capturable and supported if settings.cuda_graphs is None else settings.cuda_graphs
        recurrent = any(kind in model_config.LINEAR_ATTENTION for kind in network.config.attention)
        if not enabled or recurrent or settings.capture_routing:
            return None
        return cls(network, cache, settings)

    @property
    def count(self) -> int:
        """Number of captured graphs."""
        return sum(len(inputs.captured) for inputs in self._inputs.values())

    def recheck_weight_addresses(self) -> None:
        """Compare weight addresses before the next replay: other code had access to the network."""
        self._recheck_needed = True

    # --- passes -----------------------------------------------------------------------------------

    def decode(
        self, batch: UniformDecodeBatch, token_N: np.ndarray, future: FutureTokens | None = None
    ) -> tuple[Tensor, Tensor]:
        """Hidden states and logits of every token of a decode step."""
        inputs = self._fill(batch, token_N)
        if future is not None:
            buffer_N = inputs.views[0]
            buffer_N.copy_(future.padded_to(len(buffer_N), batch.query_len).fill(buffer_N))
        hidden_ND, logits_NV = self._replay(inputs, "decode", self._decode)
        assert logits_NV is not None
        return hidden_ND[: batch.tokens], logits_NV[: batch.tokens]

    def mtp_extend(self, batch: UniformDecodeBatch, next_N: np.ndarray) -> Tensor:
        """MTP states of the tokens of the last `decode`, given the token after each."""
        inputs = self._inputs[self.key_for(batch)]
        N = len(inputs.views[0])
        padded_N = np.concatenate((next_N, np.tile(next_N[: batch.query_len], N)))[:N]
        inputs.views[0].copy_(copy_to_device_async(padded_N.astype(np.int32), self.cache.device))
        state_ND, _ = self._replay(inputs, "mtp_extend", self._mtp_extend)
        return state_ND[: batch.tokens]

    def draft(
        self, batch: UniformDecodeBatch, hidden_BD: Tensor, token_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """MTP states and logits of one draft token per sequence, without synchronization."""
        inputs = self._fill(batch, np.zeros(batch.tokens, dtype=np.int32))
        inputs.put_tokens(token_B)
        copy_padded(inputs.hidden_ND, hidden_BD)
        state_ND, logits_NV = self._replay(inputs, "draft", self._draft)
        assert logits_NV is not None
        return state_ND[: batch.tokens], logits_NV[: batch.tokens]

    # --- captured functions -----------------------------------------------------------------------

    def _decode(self, inputs: CudaGraphBuffers) -> tuple[Tensor, Tensor | None]:
        hidden_ND = self.network.forward_with_context(
            inputs.views[0], self._context(inputs)
        ).hidden_TD
        inputs.hidden_ND.copy_(hidden_ND)
        return hidden_ND, self.network.head(hidden_ND)

    def _mtp_extend(self, inputs: CudaGraphBuffers) -> tuple[Tensor, Tensor | None]:
        return self.network.mtp_draft(
            inputs.hidden_ND, inputs.views[0], self._context(inputs)
        ), None

    def _draft(self, inputs: CudaGraphBuffers) -> tuple[Tensor, Tensor | None]:
        state_ND, _ = self._mtp_extend(inputs)
        return state_ND, self.network.head(state_ND)

    def _context(self, inputs: CudaGraphBuffers) -> ForwardContext:
        _, position_N, kv_slot_N, visible_N, page_BP = inputs.views
        size, page_size = inputs.size, self.cache.capacity.page_size
        B, Q = size.sequences, size.query_len
        pages = BlockTable(page_BP.view(B, -1), page_size)
        # Key lengths in the spans of a decode batch are not used; the block table has them.
        spans = tuple(Span(b * Q, Q, 0, Q) for b in range(B))
        metadata = AttentionMetadata(
            position_N, spans, decode_batch=DecodeBatch(pages, visible_N.view(B, Q))
        )
        kv_cache = PagedKVCacheView(self.cache, kv_slot_N.long(), [])
        cos_NP, sin_NP = self._cos_SP[position_N], self._sin_SP[position_N]
        return ForwardContext(metadata, kv_cache, cos_NP, sin_NP, AuxRequest())

    # --- internals --------------------------------------------------------------------------------

    def key_for(self, batch: UniformDecodeBatch) -> CudaGraphKey:
        """The padded size of a batch."""
        limit, capacity = self.settings.max_running_requests, self.cache.capacity
        sequences = min(_next_power_of_two(len(batch.slot_B)), max(limit, len(batch.slot_B)))
        pages = max(1, _min_keys(self.network.config) // capacity.page_size)
        while pages * capacity.page_size < batch.max_len:
            pages *= 2
        return CudaGraphKey(sequences, batch.query_len, min(pages, capacity.pages_per_sequence))

    def _fill(self, batch: UniformDecodeBatch, token_N: np.ndarray) -> CudaGraphBuffers:
        """The buffers of this size, filled with the inputs of the batch."""
        self._recheck()
        size, device = self.key_for(batch), self.cache.device
        inputs, N = self._inputs.get(size), size.sequences * size.query_len
        if inputs is None:
            number_I = torch.zeros(
                4 * N + size.sequences * size.pages, dtype=torch.int32, device=device
            )
            hidden_ND = self.network.norm.weight.new_zeros(N, self.network.config.hidden)
            inputs = self._inputs[size] = CudaGraphBuffers(number_I, hidden_ND, size)
        padded = batch.padded_to(size.sequences)
        token_N = np.concatenate((token_N, np.tile(token_N[: batch.query_len], N)))[:N]
        position_BQ = padded.past_len_B[:, None] + np.arange(batch.query_len)
        page_BP = self.cache.block_table(padded.slot_B, size.pages * self.cache.capacity.page_size)
        kv_slot_BQ = self.cache.slot_mapping_at(page_BP, position_BQ)
        numbers = (token_N, position_BQ, kv_slot_BQ, position_BQ + 1, page_BP)
        flat_I = np.concatenate([x.reshape(-1) for x in numbers]).astype(np.int32)
        inputs.number_I.copy_(copy_to_device_async(flat_I, device), non_blocking=True)
        return inputs

    def _replay(
        self,
        inputs: CudaGraphBuffers,
        name: str,
        function: Callable[[CudaGraphBuffers], tuple[Tensor, Tensor | None]],
    ) -> tuple[Tensor, Tensor | None]:
        if name not in inputs.captured:
            inputs.captured[name] = self._pool.capture(lambda: function(inputs))
        return inputs.captured[name].replay()

    def _recheck(self) -> None:
        """Drop all graphs if weights moved: graphs hold their addresses. In-place weight updates
        keep them valid."""
        if self._recheck_needed:
            self._recheck_needed, found = False, parameter_addresses(self.network)
            if found != self._addresses:
                self._addresses, self._inputs, self._pool = (
                    found,
                    {},
                    CudaGraphPool(self.cache.device),
                )


def parameter_addresses(network: Transformer) -> tuple[int, ...]:
    """The data pointers of all parameters and buffers."""
    return tuple(x.data_ptr() for x in (*network.parameters(), *network.buffers()))


def _min_keys(config: ModelConfig) -> int:
    """The smallest key capacity: as many keys as the indexer selects without choosing."""
    return config.indexer.topk if config.indexer is not None else MIN_KEYS


def _next_power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
