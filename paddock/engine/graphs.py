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
from paddock.engine.memory import Cache, StepMemory, upload
from paddock.engine.settings import EngineSettings
from paddock.kernels.block_table import BlockTable
from paddock.kernels.cuda_graphs import CapturedGraph, CudaGraphPool, can_capture
from paddock.kernels.dispatch import has_triton
from paddock.kernels.spans import Span
from paddock.model import (
    LINEAR_ATTENTION,
    AttentionMetadata,
    AuxRequest,
    DecodeBatch,
    ForwardContext,
    ModelConfig,
    Transformer,
)
from paddock.model.rope import rotary_cos_sin

ROOM = 1024  # keys of the smallest room, for networks without an indexer


@dataclass(frozen=True, slots=True)
class Size:
    sequences: int
    queries: int
    pages: int


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A batch that decodes: whose it is, how many tokens are behind each, how many are new."""

    seat_B: np.ndarray
    past_B: np.ndarray
    queries: int

    @property
    def tokens(self) -> int:
        return len(self.seat_B) * self.queries

    @property
    def longest(self) -> int:
        return int(self.past_B.max()) + self.queries

    def filled(self, sequences: int) -> "Asked":
        """The first sequence again and again behind the others."""
        missing = sequences - len(self.seat_B)
        seat_B, past_B = (
            np.concatenate((x, np.repeat(x[:1], missing))) for x in (self.seat_B, self.past_B)
        )
        return Asked(seat_B, past_B, self.queries)


@dataclass(slots=True, eq=False)
class Inputs:
    """Where the recordings of one size find what changes from step to step."""

    number_I: Tensor  # int32: tokens, positions, slots, visible keys, pages
    hidden_ND: Tensor  # what an MTP pass reads beside its tokens
    size: Size
    recorded: dict[str, CapturedGraph[tuple[Tensor, Tensor | None]]] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        N = self.size.sequences * self.size.queries
        return self.number_I.split([N, N, N, N, self.size.sequences * self.size.pages])

    def put_tokens(self, token_n: Tensor) -> None:
        fill(self.parts[0], token_n)


def fill(place_N: Tensor, given_n: Tensor) -> None:
    """The first row again where fewer are given than there is place for."""
    n = len(given_n)
    place_N[:n].copy_(given_n, non_blocking=True)
    if n < len(place_N):
        place_N[n:] = given_n[:1].to(place_N)


class Graphs:
    def __init__(self, network: Transformer, cache: Cache, settings: EngineSettings) -> None:
        self.network, self.cache, self.settings = network, cache, settings
        self._inputs: dict[Size, Inputs] = {}
        self._pool = CudaGraphPool(cache.device)
        self._weights = addresses(network)
        self._doubt = False  # whether the weights may lie elsewhere by now
        config, capacity = network.config, cache.capacity
        position_S = torch.arange(capacity.context + capacity.ahead, device=cache.device)
        self._cos_SP, self._sin_SP = rotary_cos_sin(position_S, config.rope, network.rope_dim)

    @classmethod
    def where_possible(
        cls, network: Transformer, cache: Cache, settings: EngineSettings
    ) -> "Graphs | None":
        """None where they are not wanted, for layers that keep a state, and where every step's
        choices are wanted. What runs in other types than bfloat16 asks the host for numbers."""
        dtype, recording = network.embed.weight.dtype, can_capture(cache.device)
        fit = dtype == torch.bfloat16 and has_triton()
        if settings.graphs and recording and not fit:
            raise ConfigError(f"'graphs' needs Triton and weights in bfloat16, these are {dtype}")
        wanted = recording and fit if settings.graphs is None else settings.graphs
        recurrent = any(kind in LINEAR_ATTENTION for kind in network.config.attention)
        if not wanted or recurrent or settings.replay:
            return None
        return cls(network, cache, settings)

    @property
    def count(self) -> int:
        return sum(len(inputs.recorded) for inputs in self._inputs.values())

    def doubt(self) -> None:
        """Someone had the network in hand."""
        self._doubt = True

    # --- passes -----------------------------------------------------------------------------------

    def write(self, asked: Asked, token_N: np.ndarray) -> tuple[Tensor, Tensor]:
        """States and scores over the vocabulary of every token of a step."""
        inputs = self._ready(asked, token_N)
        hidden_ND, logits_NV = self._repeat(inputs, "write", self._write)
        assert logits_NV is not None
        return hidden_ND[: asked.tokens], logits_NV[: asked.tokens]

    def read(self, asked: Asked, next_N: np.ndarray) -> Tensor:
        """MTP states of the tokens that were written last, given the token after each."""
        inputs = self._inputs[self.size(asked)]
        N = len(inputs.parts[0])
        padded_N = np.concatenate((next_N, np.tile(next_N[: asked.queries], N)))[:N]
        inputs.parts[0].copy_(upload(padded_N.astype(np.int32), self.cache.device))
        state_ND, _ = self._repeat(inputs, "read", self._read)
        return state_ND[: asked.tokens]

    def guess(self, asked: Asked, hidden_BD: Tensor, token_B: Tensor) -> tuple[Tensor, Tensor]:
        """MTP states and scores of one guessed token each; nothing waits for the device."""
        inputs = self._ready(asked, np.zeros(asked.tokens, dtype=np.int32))
        inputs.put_tokens(token_B)
        fill(inputs.hidden_ND, hidden_BD)
        state_ND, logits_NV = self._repeat(inputs, "guess", self._guess)
        assert logits_NV is not None
        return state_ND[: asked.tokens], logits_NV[: asked.tokens]

    # --- what is recorded -------------------------------------------------------------------------

    def _write(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        hidden_ND = self.network.forward_with_context(inputs.parts[0], self._step(inputs)).hidden_TD
        inputs.hidden_ND.copy_(hidden_ND)
        return hidden_ND, self.network.head(hidden_ND)

    def _read(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        return self.network.mtp_draft(inputs.hidden_ND, inputs.parts[0], self._step(inputs)), None

    def _guess(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        state_ND, _ = self._read(inputs)
        return state_ND, self.network.head(state_ND)

    def _step(self, inputs: Inputs) -> ForwardContext:
        _, position_N, slot_N, visible_N, page_BP = inputs.parts
        size, page_tokens = inputs.size, self.cache.capacity.page_tokens
        B, Q = size.sequences, size.queries
        pages = BlockTable(page_BP.view(B, -1), page_tokens)
        # Nobody asks the spans of a batch how long they are.
        spans = tuple(Span(b * Q, Q, 0, Q) for b in range(B))
        layout = AttentionMetadata(
            position_N, spans, decode_batch=DecodeBatch(pages, visible_N.view(B, Q))
        )
        memory = StepMemory(self.cache, slot_N.long(), [])
        cos_NP, sin_NP = self._cos_SP[position_N], self._sin_SP[position_N]
        return ForwardContext(layout, memory, cos_NP, sin_NP, AuxRequest())

    # --- within -----------------------------------------------------------------------------------

    def size(self, asked: Asked) -> Size:
        most, capacity = self.settings.max_running, self.cache.capacity
        sequences = min(_power(len(asked.seat_B)), max(most, len(asked.seat_B)))
        pages = max(1, _smallest_room(self.network.config) // capacity.page_tokens)
        while pages * capacity.page_tokens < asked.longest:
            pages *= 2
        return Size(sequences, asked.queries, min(pages, capacity.pages_per_sequence))

    def _ready(self, asked: Asked, token_N: np.ndarray) -> Inputs:
        """The inputs of this size, filled."""
        self._recheck()
        size, device = self.size(asked), self.cache.device
        inputs, N = self._inputs.get(size), size.sequences * size.queries
        if inputs is None:
            number_I = torch.zeros(
                4 * N + size.sequences * size.pages, dtype=torch.int32, device=device
            )
            hidden_ND = self.network.embed.weight.new_zeros(N, self.network.config.hidden)
            inputs = self._inputs[size] = Inputs(number_I, hidden_ND, size)
        whole = asked.filled(size.sequences)
        token_N = np.concatenate((token_N, np.tile(token_N[: asked.queries], N)))[:N]
        position_BQ = whole.past_B[:, None] + np.arange(asked.queries)
        page_BP = self.cache.pages(whole.seat_B, size.pages * self.cache.capacity.page_tokens)
        slot_BQ = self.cache.places(page_BP, position_BQ)
        numbers = (token_N, position_BQ, slot_BQ, position_BQ + 1, page_BP)
        flat_I = np.concatenate([x.reshape(-1) for x in numbers]).astype(np.int32)
        inputs.number_I.copy_(upload(flat_I, device), non_blocking=True)
        return inputs

    def _repeat(
        self, inputs: Inputs, name: str, work: Callable[[Inputs], tuple[Tensor, Tensor | None]]
    ) -> tuple[Tensor, Tensor | None]:
        if name not in inputs.recorded:
            inputs.recorded[name] = self._pool.capture(lambda: work(inputs))
        return inputs.recorded[name].replay()

    def _recheck(self) -> None:
        """Recordings hold the addresses of weights. Copying new ones over the old keeps them."""
        if self._doubt:
            self._doubt, found = False, addresses(self.network)
            if found != self._weights:
                self._weights, self._inputs, self._pool = (
                    found,
                    {},
                    CudaGraphPool(self.cache.device),
                )


def addresses(network: Transformer) -> tuple[int, ...]:
    """Where every parameter and buffer lies."""
    return tuple(x.data_ptr() for x in (*network.parameters(), *network.buffers()))


def _smallest_room(config: ModelConfig) -> int:
    """As many keys as need no choice."""
    return config.indexer.topk if config.indexer is not None else ROOM


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()
