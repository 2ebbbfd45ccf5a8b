"""Rows of data as tensors, whole or in parts that fit the device.

S tokens of packed documents, T of them this rank's own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paddock.data import PackedBatch
from paddock.model import AttentionMetadata
from paddock.parallel import SINGLE_RANK, ContextShard, MeshDim

IGNORE_INDEX = -100
MIN_SHARED_FRACTION = 0.1  # of a document, and of all, below which it is not worth gathering


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyBatch(PackedBatch):
    """A batch that says more about its tokens than which of them are trained: columns of T rows,
    for objectives that read them."""

    columns: Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Documents side by side. `trained_S` says which tokens count as targets.

    The layout may be one rank's piece of the row; the tokens are always the whole row's, because
    targets lie ahead.
    """

    token_S: Tensor
    loss_mask_S: Tensor
    attn_metadata: AttentionMetadata
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # of S rows
    loss_weight_S: Tensor | None = None  # how much each target counts; None: all the same
    shared_prefixes: AttentionMetadata | None = (
        None  # the same documents with common beginnings once
    )

    @property
    def token_T(self) -> Tensor:
        return (
            self.token_S
            if self.attn_metadata.context_shard is None
            else self.token_S[self.attn_metadata.context_shard.local_slice]
        )

    def targets(self, ahead: int) -> Tensor:
        """The token `ahead` places on, or IGNORED where the document ends or it does not count.

        >>> batch = MicroBatch(torch.tensor([5, 6, 7, 8]), torch.tensor([False, True, True, True]),
        ...                    AttentionMetadata.packed_rollouts([3, 1]))
        >>> batch.num_targets(1).tolist()
        [6, 7, -100, -100]
        """
        counted_S = torch.where(self.loss_mask_S, self.token_S, IGNORE_INDEX)
        return self.shift_ahead(counted_S, ahead, nothing=IGNORE_INDEX)

    def target_weights(self, ahead: int) -> Tensor | None:
        """How much each of those targets counts; None: all the same."""
        return (
            None
            if self.loss_weight_S is None
            else self.shift_ahead(self.loss_weight_S, ahead, nothing=0.0)
        )

    def shift_ahead(self, value_S: Tensor, ahead: int, *, nothing: float) -> Tensor:
        """What a column says `ahead` places on, or `nothing` where the document ends before."""
        spans, device = self.attn_metadata.spans, value_S.device
        queries = [span.queries for span in spans]
        shift_T = np.repeat([s.key + s.past - s.query + ahead for s in spans], queries)
        place_T = np.arange(len(shift_T)) + shift_T
        inside_T = place_T < np.repeat([d.stop for d in self.attn_metadata.documents], queries)
        found_T = value_S[torch.from_numpy(np.where(inside_T, place_T, 0)).to(device)]
        return torch.where(torch.from_numpy(inside_T).to(device), found_T, nothing)


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """What losses are divided by: tokens, and targets at each distance ahead, as much as they
    count."""

    tokens: int
    targets: tuple[float, ...]


def count_tokens(batch: PackedBatch, depths: int) -> TokenCounts:
    """Of a batch, for the next token and `depths` more."""
    ends = np.cumsum(batch.lengths)
    counted_T = (
        batch.loss_mask_T
        if batch.loss_weight_T is None
        else batch.loss_mask_T * batch.loss_weight_T
    )
    targets = []
    for ahead in range(1, depths + 2):
        total = 0.0
        for end, length in zip(ends, batch.lengths, strict=True):
            found = counted_T[end - length + ahead : end] if length > ahead else counted_T[:0]
            total += float(found.sum(dtype=np.float64))
        targets.append(total)
    return TokenCounts(len(batch.token_T), tuple(targets))


def split_documents(
    batch: PackedBatch, tokens: int | None, least: int = 1
) -> Iterator[tuple[slice, tuple[int, ...]]]:
    """Cut between documents into runs of at most `tokens`, a longer document alone; but never into
    a run of fewer than `least`, which joins its neighbour."""
    start = stop = 0
    lengths: list[int] = []
    for length, after in zip(batch.lengths, _lengths_from(batch), strict=True):
        full = tokens is not None and stop - start + length > tokens
        if lengths and full and stop - start >= least and after >= least:
            yield slice(start, stop), tuple(lengths)
            start, lengths = stop, []
        lengths.append(length)
        stop += length
    if lengths:
        yield slice(start, stop), tuple(lengths)


def _lengths_from(batch: PackedBatch) -> Iterator[int]:
    """Tokens from each document to the end."""
    left = len(batch.token_T)
    for length in batch.lengths:
        yield left
        left -= length


def iter_micro_batches(
    batch: PackedBatch,
    device: torch.device,
    tokens: int | None = None,
    context: MeshDim = SINGLE_RANK,
) -> Iterator[MicroBatch]:
    """The batch in micro-batches of at most `tokens`, each cut along the context axis."""
    weight_T = batch.loss_weight_T
    columns = batch.columns if isinstance(batch, PolicyBatch) else {}
    for part, lengths in split_documents(batch, tokens, least=context.size):
        layout = AttentionMetadata.packed(lengths, device=device)
        yield MicroBatch(
            torch.from_numpy(batch.token_T[part].astype(np.int64)).to(device),
            torch.from_numpy(batch.loss_mask_T[part]).to(device),
            layout if context.size == 1 else layout.shard(ContextShard(context, layout.tokens)),
            {name: torch.from_numpy(said[part]).to(device) for name, said in columns.items()},
            None if weight_T is None else torch.from_numpy(weight_T[part]).to(device),
            find_shared_prefixes(_alike(batch, columns)[part], lengths, device)
            if columns and context.size == 1
            else None,
        )


def _alike(batch: PackedBatch, columns: Mapping[str, NDArray[np.generic]]) -> NDArray[np.int32]:
    """[S, ...] what two tokens must agree in to be one: themselves, and the experts that the engine
    chose for them, which differ between versions of the weights."""
    token_S1 = batch.token_T.astype(np.int32)[:, None]
    if "experts" not in columns:
        return token_S1
    experts_SX = columns["experts"].reshape(len(token_S1), -1).astype(np.int32)
    return np.concatenate((token_S1, experts_SX), axis=1)


def find_shared_prefixes(
    row_SX: NDArray[np.int32], lengths: Sequence[int], device: torch.device
) -> AttentionMetadata | None:
    """Documents side by side with what each has in common with the first of its neighbours; None if
    that is not worth it.

    >>> row_SX = np.array([[5], [6], [7], [5], [6], [8], [9], [5], [6], [8]], np.int32)
    >>> find_shared_prefixes(row_SX, (3, 4, 3), torch.device("cpu")).kv_slot_S.tolist()
    [0, 1, 2, 0, 1, 3, 4, 0, 1, 5]
    """
    documents = np.split(row_SX, np.cumsum(lengths)[:-1])
    shared, first = [], 0
    for number, document in enumerate(documents):
        common = 0 if number == first else _common(documents[first], document)
        if common < MIN_SHARED_FRACTION * len(document):
            first, common = number, 0
        shared.append((first, common))
    if sum(common for _, common in shared) < MIN_SHARED_FRACTION * len(row_SX):
        return None
    return AttentionMetadata.with_shared_prefixes(lengths, shared, device)


def _common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How many rows two documents begin with alike."""
    size = min(len(one), len(other))
    differ = np.flatnonzero((one[:size] != other[:size]).any(1))
    return int(differ[0]) if len(differ) else size
