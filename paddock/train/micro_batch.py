"""Packed batches as tensors on the device, split into micro batches, with shared prefixes.

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
# Of a document, and of all tokens: below it, gathering a shared prefix costs more than it saves.
MIN_SHARED_FRACTION = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyBatch(PackedBatch):
    """A packed batch with further per-token columns (T rows each) for the policy objective."""

    columns: Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Packed documents. `loss_mask_S` says which tokens are targets.

    `attn_metadata` may cover one context-parallel rank's shard of the row; tokens are always those
    of the whole row, because targets lie ahead.
    """

    token_S: Tensor
    loss_mask_S: Tensor
    attn_metadata: AttentionMetadata
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # S rows each
    loss_weight_S: Tensor | None = None  # weight of each target; None: all 1
    # The same documents with each shared prefix computed once; None if little is shared.
    shared_prefixes: AttentionMetadata | None = None

    @property
    def token_T(self) -> Tensor:
        """Tokens of this rank's shard."""
        return (
            self.token_S
            if self.attn_metadata.context_shard is None
            else self.token_S[self.attn_metadata.context_shard.local_slice]
        )

    def targets(self, ahead: int) -> Tensor:
        """The token `ahead` positions later, or IGNORE_INDEX if masked or behind the document.

        >>> batch = MicroBatch(torch.tensor([5, 6, 7, 8]), torch.tensor([False, True, True, True]),
        ...                    AttentionMetadata.packed([3, 1]))
        >>> batch.targets(1).tolist()
        [6, 7, -100, -100]
        """
        target_S = torch.where(self.loss_mask_S, self.token_S, IGNORE_INDEX)
        return self.shift_ahead(target_S, ahead, fill=IGNORE_INDEX)

    def target_weights(self, ahead: int) -> Tensor | None:
        """Loss weight of each of those targets; None: all 1."""
        return (
            None
            if self.loss_weight_S is None
            else self.shift_ahead(self.loss_weight_S, ahead, fill=0.0)
        )

    def shift_ahead(self, value_S: Tensor, ahead: int, *, fill: float) -> Tensor:
        """[T] the value `ahead` positions later, or `fill` behind the end of the document."""
        spans, device = self.attn_metadata.spans, value_S.device
        queries = [span.queries for span in spans]
        shift_T = np.repeat([s.key + s.past - s.query + ahead for s in spans], queries)
        position_T = np.arange(len(shift_T)) + shift_T
        inside_T = position_T < np.repeat([d.stop for d in self.attn_metadata.documents], queries)
        found_T = value_S[torch.from_numpy(np.where(inside_T, position_T, 0)).to(device)]
        return torch.where(torch.from_numpy(inside_T).to(device), found_T, fill)


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Denominators of the losses: tokens, and the summed weight of targets at each distance."""

    tokens: int
    targets: tuple[float, ...]


def count_tokens(batch: PackedBatch, depths: int) -> TokenCounts:
    """Count tokens, and targets for the next token and `depths` further ones."""
    ends = np.cumsum(batch.lengths)
    weight_T = (
        batch.loss_mask_T
        if batch.loss_weight_T is None
        else batch.loss_mask_T * batch.loss_weight_T
    )
    targets = []
    for ahead in range(1, depths + 2):
        total = 0.0
        for end, length in zip(ends, batch.lengths, strict=True):
            found = weight_T[end - length + ahead : end] if length > ahead else weight_T[:0]
            total += float(found.sum(dtype=np.float64))
        targets.append(total)
    return TokenCounts(len(batch.token_T), tuple(targets))


def split_documents(
    batch: PackedBatch, tokens: int | None, min_tokens: int = 1
) -> Iterator[tuple[slice, tuple[int, ...]]]:
    """Split a batch between documents into parts of at most `tokens`; None: one part.

    A longer document is a part of its own. A part of fewer than `min_tokens` joins its neighbour.
    Yields the tokens and the document lengths of each part.
    """
    start = stop = 0
    lengths: list[int] = []
    for length, after in zip(batch.lengths, _lengths_from(batch), strict=True):
        full = tokens is not None and stop - start + length > tokens
        if lengths and full and stop - start >= min_tokens and after >= min_tokens:
            yield slice(start, stop), tuple(lengths)
            start, lengths = stop, []
        lengths.append(length)
        stop += length
    if lengths:
        yield slice(start, stop), tuple(lengths)


def _lengths_from(batch: PackedBatch) -> Iterator[int]:
    """Tokens from the start of each document to the end of the batch."""
    remaining = len(batch.token_T)
    for length in batch.lengths:
        yield remaining
        remaining -= length


def iter_micro_batches(
    batch: PackedBatch,
    device: torch.device,
    tokens: int | None = None,
    context: MeshDim = SINGLE_RANK,
) -> Iterator[MicroBatch]:
    """Micro batches of at most `tokens`, each sharded along the context-parallel dimension."""
    weight_T = batch.loss_weight_T
    columns = batch.columns if isinstance(batch, PolicyBatch) else {}
    for part, lengths in split_documents(batch, tokens, min_tokens=context.size):
        metadata = AttentionMetadata.packed(lengths, device=device)
        yield MicroBatch(
            torch.from_numpy(batch.token_T[part].astype(np.int64)).to(device),
            torch.from_numpy(batch.loss_mask_T[part]).to(device),
            metadata
            if context.size == 1
            else metadata.shard(ContextShard(context, metadata.tokens)),
            {name: torch.from_numpy(column[part]).to(device) for name, column in columns.items()},
            None if weight_T is None else torch.from_numpy(weight_T[part]).to(device),
            find_shared_prefixes(_prefix_keys(batch, columns)[part], lengths, device)
            if columns and context.size == 1
            else None,
        )


def _prefix_keys(
    batch: PackedBatch, columns: Mapping[str, NDArray[np.generic]]
) -> NDArray[np.int32]:
    """[S, X] what must be equal for two tokens to be shared: the token id and its routed experts.

    The engine's routing of the same tokens differs between weight versions.
    """
    token_S1 = batch.token_T.astype(np.int32)[:, None]
    if "routed_experts" not in columns:
        return token_S1
    experts_SX = columns["routed_experts"].reshape(len(token_S1), -1).astype(np.int32)
    return np.concatenate((token_S1, experts_SX), axis=1)


def find_shared_prefixes(
    row_SX: NDArray[np.int32], lengths: Sequence[int], device: torch.device
) -> AttentionMetadata | None:
    """Attention metadata in which neighbouring documents share a common prefix.

    Each document is compared with the first of its run of neighbours. Returns None if less than
    MIN_SHARED_FRACTION of all tokens would be shared.

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
    """Length of the common prefix of two documents."""
    size = min(len(one), len(other))
    differ = np.flatnonzero((one[:size] != other[:size]).any(1))
    return int(differ[0]) if len(differ) else size
