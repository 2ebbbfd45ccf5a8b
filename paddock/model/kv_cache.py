"""KV cache interface of the model, and the two caches that need no paging.

A layer passes the KV entries of its new tokens to `update` and gets back the storage that holds
these and all earlier ones. Layers do not know whether they train or serve: the
`AttentionMetadata` says which entries of that storage each query may attend to. The paged KV cache
of the engine implements the same protocol.

T new tokens of the packed step.
"""

from typing import Protocol

import torch
from torch import Tensor

from paddock.kernels.spans import Span
from paddock.model.attention_metadata import AttentionMetadata


class KVCache(Protocol):
    """One storage per (layer, stream): "row" (latent KV entries) and "index" (index keys) for
    latent attention, "key" and "value" for grouped attention. Recurrent layers keep one state per
    span instead."""

    def update(self, layer: int, stream: str, rows_T: Tensor) -> Tensor:
        """Store the new entries; return the storage that holds them and all earlier ones."""

    def load_state(self, layer: int, stream: str, span: int) -> Tensor | None:
        """The recurrent state of this span's sequence; None at its first token."""

    def store_state(self, layer: int, stream: str, span: int, state: Tensor) -> None:
        """Keep a recurrent state for the sequence's next step."""


class NoCache:
    """Training without a KV cache: every key is a token of the same step."""

    def update(self, layer: int, stream: str, rows_T: Tensor) -> Tensor:  # noqa: ARG002
        return rows_T

    def load_state(self, layer: int, stream: str, span: int) -> None:  # noqa: ARG002
        return None

    def store_state(self, layer: int, stream: str, span: int, state: Tensor) -> None:
        pass


class GrowingCache:
    """KV cache of one sequence that grows by concatenation, for tests and simple generation."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, str], Tensor] = {}
        self._states: dict[tuple[int, str, int], Tensor] = {}
        self._tokens = 0

    def next_metadata(self, tokens: int, device: torch.device | str = "cpu") -> AttentionMetadata:
        """Metadata of the next `tokens` tokens, which follow everything cached so far."""
        past, self._tokens = self._tokens, self._tokens + tokens
        position_T = torch.arange(past, self._tokens, device=device)
        return AttentionMetadata(position_T, (Span(0, tokens, 0, self._tokens),))

    def update(self, layer: int, stream: str, rows_T: Tensor) -> Tensor:
        past = self._rows.get((layer, stream))
        self._rows[layer, stream] = rows_T if past is None else torch.cat((past, rows_T))
        return self._rows[layer, stream]

    def load_state(self, layer: int, stream: str, span: int) -> Tensor | None:
        return self._states.get((layer, stream, span))

    def store_state(self, layer: int, stream: str, span: int, state: Tensor) -> None:
        self._states[layer, stream, span] = state
