"""Attention metadata of a packed step: positions, spans, KV slots and the decode batch.

T new tokens of the packed step, S KV slots or keys of the spans, B sequences of a decode batch with
Q queries each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from paddock.kernels.block_table import BlockTable
from paddock.kernels.decoder_layer import PagedStep
from paddock.kernels.spans import Span
from paddock.parallel import ContextShard


@dataclass(frozen=True, eq=False)
class DecodeBatch:
    """The decoding sequences of a step, each with the same small number of queries.

    They are the last spans of the metadata and run in one paged kernel: their keys are addressed
    through the block table.
    """

    block_table: BlockTable
    visible_BQ: Tensor  # number of keys of its sequence that each query attends to

    @property
    def sequences(self) -> int:
        return self.visible_BQ.shape[0]

    @property
    def queries(self) -> int:
        return self.visible_BQ.shape[1]

    @property
    def max_keys(self) -> int:
        """Upper bound on the keys of any sequence of this batch."""
        return self.block_table.max_keys


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """Positions, query and key spans, and KV slots of one packed step.

    `spans` number keys as if the KV entries of all sequences were concatenated; `kv_slot_S` is the
    storage slot of each of those keys. None: the storage already has that order.

    With a `decode_batch` the last spans are decoded through its block table; the others are
    prefill spans, and `kv_slot_S` covers their keys only.

    With a `context_shard` the queries are one rank's shard of a packed row and the keys those of
    the whole row. A document may continue past the last local query; `document_ends` says where it
    ends.

    With `query_T` documents have shared prefixes (`with_shared_prefixes`): spans cover whole
    documents, `kv_slot_S` is the token of the step behind each of their queries and keys, and
    `query_T` the one query whose output each token takes. Only attention computes a shared token
    more than once.

    A `paged_step` describes the same sequences once more, for packed layers on a CPU.
    """

    position_T: Tensor
    spans: tuple[Span, ...]
    kv_slot_S: Tensor | None = None
    context_shard: ContextShard | None = None
    document_ends: tuple[int, ...] | None = None  # key index after each span's document
    decode_batch: DecodeBatch | None = None
    query_T: Tensor | None = None
    paged_step: PagedStep | None = None

    @classmethod
    def packed(
        cls, lengths: Sequence[int], device: torch.device | str = "cpu"
    ) -> "AttentionMetadata":
        """Whole documents in one row; none attends to another."""
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
        """Whole documents that share prefixes, computed once: `shared` is for each document the
        number of an earlier document and the length of their shared prefix, 0 for none.

        >>> metadata = AttentionMetadata.with_shared_prefixes([3, 4], [(0, 0), (0, 2)])
        >>> metadata.position_T.tolist(), metadata.kv_slot_S.tolist()
        ([0, 1, 2, 2, 3], [0, 1, 2, 0, 1, 3, 4])
        """
        packed = cls.packed(lengths)
        slot_S = np.empty(packed.tokens, np.int64)
        tokens, own_queries = 0, []
        for span, (parent, shared_tokens) in zip(packed.spans, shared, strict=True):
            start, parent_start = span.query, packed.spans[parent].query
            slot_S[start : start + shared_tokens] = slot_S[
                parent_start : parent_start + shared_tokens
            ]
            new_tokens = span.queries - shared_tokens
            slot_S[start + shared_tokens : start + span.queries] = np.arange(
                tokens, tokens + new_tokens
            )
            own_queries.append(np.arange(start + shared_tokens, start + span.queries))
            tokens += new_tokens
        query_T = torch.from_numpy(np.concatenate(own_queries)).to(device)
        return cls(
            packed.position_T.to(device)[query_T],
            packed.spans,
            kv_slot_S=torch.from_numpy(slot_S).to(device),
            query_T=query_T,
        )

    def shard(self, shard: ContextShard) -> "AttentionMetadata":
        """The metadata of this rank's shard of a packed row.

        >>> from paddock.parallel import SINGLE_RANK
        >>> AttentionMetadata.packed([3, 4]).shard(ContextShard(SINGLE_RANK, 7)).documents
        (slice(0, 3, None), slice(3, 7, None))
        """
        local, spans, ends = shard.local_slice, [], []
        for span in self.spans:
            start = max(local.start, span.query) - span.query
            stop = min(local.stop, span.query + span.queries) - span.query
            if start < stop:
                part = span.part(start, stop)
                spans.append(replace(part, query=part.query - local.start))
                ends.append(span.key + span.keys)
        return AttentionMetadata(
            self.position_T[local], tuple(spans), context_shard=shard, document_ends=tuple(ends)
        )

    @property
    def tokens(self) -> int:
        return self.position_T.shape[0]

    @property
    def documents(self) -> tuple[slice, ...]:
        """The key range of each span's whole document."""
        ends = self.document_ends or [span.key + span.keys for span in self.spans]
        return tuple(slice(s.key, end) for s, end in zip(self.spans, ends, strict=True))

    @property
    def prefill_spans(self) -> tuple[Span, ...]:
        """The spans outside the decode batch."""
        return (
            self.spans if self.decode_batch is None else self.spans[: -self.decode_batch.sequences]
        )

    @property
    def num_prefill_tokens(self) -> int:
        batch = self.decode_batch
        return self.tokens if batch is None else self.tokens - batch.sequences * batch.queries

    def split_prefill_decode(self, x_T: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The rows of the prefill spans and of the decode batch; None where one is empty."""
        if self.decode_batch is None:
            return self.expand_queries(x_T), None
        prefill = self.num_prefill_tokens
        return (x_T[:prefill], x_T[prefill:]) if prefill else (None, x_T)

    def expand_queries(self, x_T: Tensor) -> Tensor:
        """One row per query of the spans, repeating tokens of shared prefixes."""
        if self.query_T is None:
            return x_T
        assert self.kv_slot_S is not None
        return _take_rows(x_T, self.kv_slot_S)

    def select_own(self, x_S: Tensor) -> Tensor:
        """One row per token of the step, from one row per query of the spans."""
        return x_S if self.query_T is None else _take_rows(x_S, self.query_T)

    def gather_keys(self, storage: Tensor) -> Tensor:
        """The KV entries of the prefill spans, in the key order of the spans."""
        if self.context_shard is not None:
            return self.context_shard.all_gather(storage)
        return storage if self.kv_slot_S is None else _take_rows(storage, self.kv_slot_S)


def _take_rows(x: Tensor, index_N: Tensor) -> Tensor:
    """Rows by index."""
    # index_select is twice as fast on a CPU; on a GPU its backward uses atomics, so it would not be
    # deterministic.
    return x.index_select(0, index_N) if x.device.type == "cpu" else x[index_N]
