"""Steps of decoding, recorded once for every size and then repeated.

A batch is filled up to the next power of two by repeating its first sequence: the copies compute
what the first one does, choose the same experts and write the same rows to the same places. The
room for keys is a power of two as well. A recording is made when its size is first met.

N tokens of a step: B sequences with Q each; P pages that a sequence may have; D hidden, V
vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paddock.config import ConfigError
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

MIN_KEYS = 1024  # keys of the smallest room, for networks without an indexer


@dataclass(frozen=True, slots=True)
class CudaGraphKey:
    sequences: int
    query_len: int
    pages: int


@dataclass(frozen=True, slots=True, eq=False)
class UniformDecodeBatch:
    """A batch that decodes: whose it is, how many tokens are behind each, how many are new."""

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
        """The first sequence again and again behind the others."""
        missing = sequences - len(self.slot_B)
        seat_B, past_B = (
            np.concatenate((x, np.repeat(x[:1], missing))) for x in (self.slot_B, self.past_len_B)
        )
        return UniformDecodeBatch(seat_B, past_B, self.query_len)


@dataclass(slots=True, eq=False)
class CudaGraphBuffers:
    """Where the recordings of one size find what changes from step to step."""

    number_I: Tensor  # int32: tokens, positions, slots, visible keys, pages
    hidden_ND: Tensor  # what an MTP pass reads beside its tokens
    size: CudaGraphKey
    captured: dict[str, CapturedGraph[tuple[Tensor, Tensor | None]]] = field(default_factory=dict)

    @property
    def views(self) -> tuple[Tensor, ...]:
        N = self.size.sequences * self.size.query_len
        return self.number_I.split([N, N, N, N, self.size.sequences * self.size.pages])

    def put_tokens(self, token_n: Tensor) -> None:
        copy_padded(self.views[0], token_n)


def copy_padded(place_N: Tensor, given_n: Tensor) -> None:
    """The first row again where fewer are given than there is place for."""
    n = len(given_n)
    place_N[:n].copy_(given_n, non_blocking=True)
    if n < len(place_N):
        place_N[n:] = given_n[:1].to(place_N)


class CudaGraphRunner:
    def __init__(self, network: Transformer, cache: PagedKVCache, settings: EngineSettings) -> None:
        self.network, self.cache, self.settings = network, cache, settings
        self._inputs: dict[CudaGraphKey, CudaGraphBuffers] = {}
        self._pool = CudaGraphPool(cache.device)
        self._weights = parameter_addresses(network)
        self._doubt = False  # whether the weights may lie elsewhere by now
        config, capacity = network.config, cache.capacity
        position_S = torch.arange(
            capacity.context_length + capacity.lookahead_slots, device=cache.device
        )
        self._cos_SP, self._sin_SP = rotary_cos_sin(position_S, config.rope, network.rope_dim)

    @classmethod
    def create_if_supported(
        cls, network: Transformer, cache: PagedKVCache, settings: EngineSettings
    ) -> "CudaGraphRunner | None":
        """None where they are not wanted, for layers that keep a state, and where every step's
        choices are wanted. What runs in other types than bfloat16 asks the host for numbers."""
        dtype, recording = network.embed.weight.dtype, can_capture(cache.device)
        fit = dtype == torch.bfloat16 and has_triton()
        if settings.cuda_graphs and recording and not fit:
            raise ConfigError(f"'graphs' needs Triton and weights in bfloat16, these are {dtype}")
        wanted = recording and fit if settings.cuda_graphs is None else settings.cuda_graphs
        recurrent = any(kind in model_config.LINEAR_ATTENTION for kind in network.config.attention)
        if not wanted or recurrent or settings.capture_routing:
            return None
        return cls(network, cache, settings)

    @property
    def count(self) -> int:
        return sum(len(inputs.captured) for inputs in self._inputs.values())

    def recheck_weight_addresses(self) -> None:
        """Someone had the network in hand."""
        self._doubt = True

    # --- passes -----------------------------------------------------------------------------------

    def decode(self, asked: UniformDecodeBatch, token_N: np.ndarray) -> tuple[Tensor, Tensor]:
        """States and scores over the vocabulary of every token of a step."""
        inputs = self._ready(asked, token_N)
        hidden_ND, logits_NV = self._repeat(inputs, "write", self._write)
        assert logits_NV is not None
        return hidden_ND[: asked.tokens], logits_NV[: asked.tokens]

    def mtp_extend(self, asked: UniformDecodeBatch, next_N: np.ndarray) -> Tensor:
        """MTP states of the tokens that were written last, given the token after each."""
        inputs = self._inputs[self.key_for(asked)]
        N = len(inputs.views[0])
        padded_N = np.concatenate((next_N, np.tile(next_N[: asked.query_len], N)))[:N]
        inputs.views[0].copy_(copy_to_device_async(padded_N.astype(np.int32), self.cache.device))
        state_ND, _ = self._repeat(inputs, "read", self._read)
        return state_ND[: asked.tokens]

    def draft(
        self, asked: UniformDecodeBatch, hidden_BD: Tensor, token_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """MTP states and scores of one guessed token each; nothing waits for the device."""
        inputs = self._ready(asked, np.zeros(asked.tokens, dtype=np.int32))
        inputs.put_tokens(token_B)
        copy_padded(inputs.hidden_ND, hidden_BD)
        state_ND, logits_NV = self._repeat(inputs, "guess", self._guess)
        assert logits_NV is not None
        return state_ND[: asked.tokens], logits_NV[: asked.tokens]

    # --- what is recorded -------------------------------------------------------------------------

    def _write(self, inputs: CudaGraphBuffers) -> tuple[Tensor, Tensor | None]:
        hidden_ND = self.network.forward_with_context(inputs.views[0], self._step(inputs)).hidden_TD
        inputs.hidden_ND.copy_(hidden_ND)
        return hidden_ND, self.network.head(hidden_ND)

    def _read(self, inputs: CudaGraphBuffers) -> tuple[Tensor, Tensor | None]:
        return self.network.mtp_draft(inputs.hidden_ND, inputs.views[0], self._step(inputs)), None

    def _guess(self, inputs: CudaGraphBuffers) -> tuple[Tensor, Tensor | None]:
        state_ND, _ = self._read(inputs)
        return state_ND, self.network.head(state_ND)

    def _step(self, inputs: CudaGraphBuffers) -> ForwardContext:
        _, position_N, slot_N, visible_N, page_BP = inputs.views
        size, page_tokens = inputs.size, self.cache.capacity.page_size
        B, Q = size.sequences, size.query_len
        pages = BlockTable(page_BP.view(B, -1), page_tokens)
        # Nobody asks the spans of a batch how long they are.
        spans = tuple(Span(b * Q, Q, 0, Q) for b in range(B))
        layout = AttentionMetadata(
            position_N, spans, decode_batch=DecodeBatch(pages, visible_N.view(B, Q))
        )
        memory = PagedKVCacheView(self.cache, slot_N.long(), [])
        cos_NP, sin_NP = self._cos_SP[position_N], self._sin_SP[position_N]
        return ForwardContext(layout, memory, cos_NP, sin_NP, AuxRequest())

    # --- within -----------------------------------------------------------------------------------

    def key_for(self, asked: UniformDecodeBatch) -> CudaGraphKey:
        most, capacity = self.settings.max_running_requests, self.cache.capacity
        sequences = min(_power(len(asked.slot_B)), max(most, len(asked.slot_B)))
        pages = max(1, _smallest_room(self.network.config) // capacity.page_size)
        while pages * capacity.page_size < asked.max_len:
            pages *= 2
        return CudaGraphKey(sequences, asked.query_len, min(pages, capacity.pages_per_sequence))

    def _ready(self, asked: UniformDecodeBatch, token_N: np.ndarray) -> CudaGraphBuffers:
        """The inputs of this size, filled."""
        self._recheck()
        size, device = self.key_for(asked), self.cache.device
        inputs, N = self._inputs.get(size), size.sequences * size.query_len
        if inputs is None:
            number_I = torch.zeros(
                4 * N + size.sequences * size.pages, dtype=torch.int32, device=device
            )
            hidden_ND = self.network.embed.weight.new_zeros(N, self.network.config.hidden)
            inputs = self._inputs[size] = CudaGraphBuffers(number_I, hidden_ND, size)
        whole = asked.padded_to(size.sequences)
        token_N = np.concatenate((token_N, np.tile(token_N[: asked.query_len], N)))[:N]
        position_BQ = whole.past_len_B[:, None] + np.arange(asked.query_len)
        page_BP = self.cache.block_table(whole.slot_B, size.pages * self.cache.capacity.page_size)
        slot_BQ = self.cache.slot_mapping_at(page_BP, position_BQ)
        numbers = (token_N, position_BQ, slot_BQ, position_BQ + 1, page_BP)
        flat_I = np.concatenate([x.reshape(-1) for x in numbers]).astype(np.int32)
        inputs.number_I.copy_(copy_to_device_async(flat_I, device), non_blocking=True)
        return inputs

    def _repeat(
        self,
        inputs: CudaGraphBuffers,
        name: str,
        work: Callable[[CudaGraphBuffers], tuple[Tensor, Tensor | None]],
    ) -> tuple[Tensor, Tensor | None]:
        if name not in inputs.captured:
            inputs.captured[name] = self._pool.capture(lambda: work(inputs))
        return inputs.captured[name].replay()

    def _recheck(self) -> None:
        """Recordings hold the addresses of weights. Copying new ones over the old keeps them."""
        if self._doubt:
            self._doubt, found = False, parameter_addresses(self.network)
            if found != self._weights:
                self._weights, self._inputs, self._pool = (
                    found,
                    {},
                    CudaGraphPool(self.cache.device),
                )


def parameter_addresses(network: Transformer) -> tuple[int, ...]:
    """Where every parameter and buffer lies."""
    return tuple(x.data_ptr() for x in (*network.parameters(), *network.buffers()))


def _smallest_room(config: ModelConfig) -> int:
    """As many keys as need no choice."""
    return config.indexer.topk if config.indexer is not None else MIN_KEYS


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()
