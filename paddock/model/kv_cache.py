"""What a layer may look back on. Training has no past; serving has pages of it.

A layer hands over the rows of its new tokens and gets back the storage that holds all rows. It
never asks which mode it is in: `Layout` says where in that storage each query may look.

T new tokens of the packed step, S rows of storage or of the layout's key space, B sequences of a
batch with Q queries each, M keys that one of them may have.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from paddock.kernels.block_table import BlockTable
from paddock.kernels.spans import Span
from paddock.parallel import ContextShard


@dataclass(frozen=True, eq=False)
class DecodeBatch:
    """Sequences of a step that have the same few queries each: one step of decoding.

    They are a layout's last spans, attended to all at once. Their keys lie in pages of the storage.
    """

    block_table: BlockTable
    visible_BQ: Tensor  # how many keys of its sequence each query sees

    @property
    def sequences(self) -> int:
        return self.visible_BQ.shape[0]

    @property
    def queries(self) -> int:
        return self.visible_BQ.shape[1]

    @property
    def max_keys(self) -> int:
        """Keys that a sequence of this batch may have."""
        return self.block_table.max_keys


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """Who sits where in a packed step.

    `spans` speak of keys as if every sequence's rows lay one after the other; `slot_S` says which
    row of storage each of those keys really is. None: storage is laid out just so.

    With a `batch` the last spans have pages instead (see there); the others are `loose`, and
    `slot_S` speaks of their keys alone.

    With a `cut` the queries are one rank's piece of a packed row, and the keys are those of the
    whole row. A document may go on behind the last query here; `ends` says where it does end.

    With `query_T` documents share beginnings (`Layout.branching`): spans speak of whole documents,
    `slot_S` says which token of the step each of their queries and keys is, and `query_T` which
    query speaks for each token. Only attention sees a shared token more than once.
    """

    position_T: Tensor
    spans: tuple[Span, ...]
    kv_slot_S: Tensor | None = None
    context_shard: ContextShard | None = None
    document_ends: tuple[int, ...] | None = None  # of the spans' documents, among the keys
    decode_batch: DecodeBatch | None = None
    query_T: Tensor | None = None

    @classmethod
    def packed(
        cls, lengths: Sequence[int], device: torch.device | str = "cpu"
    ) -> "AttentionMetadata":
        """Whole documents side by side, each blind to the others."""
        spans, start = [], 0
        for length in lengths:
            spans.append(Span(start, length, start, length))
            start += length
        position_T = np.arange(start) - np.repeat(
            np.array([span.query for span in spans], np.int64), lengths
        )
        return cls(torch.from_numpy(position_T).to(device), tuple(spans))

    @classmethod
    def with_shared_prefixes(
        cls,
        lengths: Sequence[int],
        shared: Sequence[tuple[int, int]],
        device: torch.device | str = "cpu",
    ) -> "AttentionMetadata":
        """Whole documents, each of which begins as an earlier one does: `shared` are that one's
        number and how many tokens they have in common, none for a document of its own.

        >>> layout = AttentionMetadata.with_shared_prefixes([3, 4], [(0, 0), (0, 2)])
        >>> layout.position_T.tolist(), layout.kv_slot_S.tolist()
        ([0, 1, 2, 2, 3], [0, 1, 2, 0, 1, 3, 4])
        """
        whole = cls.packed(lengths)
        slot_S = np.empty(whole.tokens, np.int64)
        tokens, own = 0, []
        for span, (other, common) in zip(whole.spans, shared, strict=True):
            start, earlier = span.query, whole.spans[other].query
            slot_S[start : start + common] = slot_S[earlier : earlier + common]
            new = span.queries - common
            slot_S[start + common : start + span.queries] = np.arange(tokens, tokens + new)
            own.append(np.arange(start + common, start + span.queries))
            tokens += new
        query_T = torch.from_numpy(np.concatenate(own)).to(device)
        return cls(
            whole.position_T.to(device)[query_T],
            whole.spans,
            kv_slot_S=torch.from_numpy(slot_S).to(device),
            query_T=query_T,
        )

    def shard(self, cut: ContextShard) -> "AttentionMetadata":
        """This rank's part of a packed row.

        >>> from paddock.parallel import SINGLE_RANK
        >>> AttentionMetadata.packed_rollouts([3, 4]).shard(ContextShard(SINGLE_RANK, 7)).documents_per_source
        (slice(0, 3, None), slice(3, 7, None))
        """
        here, spans, ends = cut.local_slice, [], []
        for span in self.spans:
            start = max(here.start, span.query) - span.query
            stop = min(here.stop, span.query + span.queries) - span.query
            if start < stop:
                part = span.part(start, stop)
                spans.append(replace(part, query=part.query - here.start))
                ends.append(span.key + span.keys)
        return AttentionMetadata(
            self.position_T[here], tuple(spans), context_shard=cut, document_ends=tuple(ends)
        )

    @property
    def tokens(self) -> int:
        return self.position_T.shape[0]

    @property
    def documents(self) -> tuple[slice, ...]:
        """Where each span's whole document stands among the keys."""
        ends = self.document_ends or [span.key + span.keys for span in self.spans]
        return tuple(slice(s.key, end) for s, end in zip(self.spans, ends, strict=True))

    @property
    def prefill_spans(self) -> tuple[Span, ...]:
        """The spans that are in no batch."""
        return (
            self.spans if self.decode_batch is None else self.spans[: -self.decode_batch.sequences]
        )

    @property
    def num_prefill_tokens(self) -> int:
        batch = self.decode_batch
        return self.tokens if batch is None else self.tokens - batch.sequences * batch.queries

    def split_prefill_decode(self, x_T: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What belongs to the loose spans and what to the batch; None where there is nothing."""
        if self.decode_batch is None:
            return self.expand_queries(x_T), None
        loose = self.num_prefill_tokens
        return (x_T[:loose], x_T[loose:]) if loose else (None, x_T)

    def expand_queries(self, x_T: Tensor) -> Tensor:
        """What each query of the spans is, where tokens of the step stand for several."""
        if self.query_T is None:
            return x_T
        assert self.kv_slot_S is not None
        return _taken(x_T, self.kv_slot_S)

    def select_own(self, x_S: Tensor) -> Tensor:
        """Of what was found for every query, what each token of the step takes."""
        return x_S if self.query_T is None else _taken(x_S, self.query_T)

    def gather_keys(self, storage: Tensor) -> Tensor:
        """The stored rows of the loose spans, in the order they speak of."""
        if self.context_shard is not None:
            return self.context_shard.all_gather(storage)
        return storage if self.kv_slot_S is None else _taken(storage, self.kv_slot_S)


def _taken(x: Tensor, place_N: Tensor) -> Tensor:
    """Rows by number. On a CPU one way is twice as fast; on a GPU its gradients come by atomics."""
    return x.index_select(0, place_N) if x.device.type == "cpu" else x[place_N]


class KVCache(Protocol):
    """One storage per (layer, stream): "row" and "index" for latent layers, "key" and "value" for
    grouped ones. Recurrent layers keep a state per span instead."""

    def update(self, layer: int, stream: str, rows_T: Tensor) -> Tensor:
        """Remember the new rows; return the storage that holds them and all before them."""

    def load_state(self, layer: int, stream: str, span: int) -> Tensor | None:
        """The state kept for this span's sequence; None at its beginning."""

    def store_state(self, layer: int, stream: str, span: int, state: Tensor) -> None:
        """Leave a state for the sequence's next step."""


class NoCache:
    """Training: the step is the whole past."""

    def update(self, layer: int, stream: str, rows_T: Tensor) -> Tensor:  # noqa: ARG002
        return rows_T

    def load_state(self, layer: int, stream: str, span: int) -> None:  # noqa: ARG002
        return None

    def store_state(self, layer: int, stream: str, span: int, state: Tensor) -> None:
        pass


class GrowingCache:
    """One sequence, remembered by appending: the simplest serving memory.

    The paged one of the engine keeps the same promise for many sequences at once.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[int, str], Tensor] = {}
        self._states: dict[tuple[int, str, int], Tensor] = {}
        self._tokens = 0

    def next_metadata(self, tokens: int, device: torch.device | str = "cpu") -> AttentionMetadata:
        """Place the next `tokens` tokens behind everything placed so far."""
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
