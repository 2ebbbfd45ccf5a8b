"""Rows of data as tensors, whole or in parts that fit the device.

S tokens of packed documents, T of them this rank's own.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paddock.data import Batch
from paddock.model import Layout
from paddock.parallel import SOLO, Axis, Cut

IGNORED = -100


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """Documents side by side. `trained_S` says which tokens count as targets.

    The layout may be one rank's piece of the row; the tokens are always the whole row's, because
    targets lie ahead.
    """

    token_S: Tensor
    trained_S: Tensor
    layout: Layout

    @property
    def token_T(self) -> Tensor:
        return self.token_S if self.layout.cut is None else self.token_S[self.layout.cut.here]

    def targets(self, ahead: int) -> Tensor:
        """The token `ahead` places on, or IGNORED where the document ends or it does not count.

        >>> batch = TokenBatch(torch.tensor([5, 6, 7, 8]), torch.tensor([False, True, True, True]),
        ...                    Layout.packed([3, 1]))
        >>> batch.targets(1).tolist()
        [6, 7, -100, -100]
        """
        target_T = torch.full_like(self.token_T, IGNORED)
        counted_S = torch.where(self.trained_S, self.token_S, IGNORED)
        for span, document in zip(self.layout.spans, self.layout.documents, strict=True):
            first = span.key + span.past + ahead
            found = counted_S[first : min(first + span.queries, document.stop)]
            target_T[span.query : span.query + len(found)] = found
        return target_T


@dataclass(frozen=True, slots=True)
class Counts:
    """What losses are divided by: tokens, and targets at each distance ahead."""

    tokens: int
    targets: tuple[int, ...]


def counts(batch: Batch, depths: int) -> Counts:
    """Of a batch, for the next token and `depths` more."""
    ends = np.cumsum(batch.lengths)
    targets = []
    for ahead in range(1, depths + 2):
        total = 0
        for end, length in zip(ends, batch.lengths, strict=True):
            total += int(batch.trained_T[end - length + ahead : end].sum()) if length > ahead else 0
        targets.append(total)
    return Counts(len(batch.token_T), tuple(targets))


def parts(
    batch: Batch, tokens: int | None, least: int = 1
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


def _lengths_from(batch: Batch) -> Iterator[int]:
    """Tokens from each document to the end."""
    left = len(batch.token_T)
    for length in batch.lengths:
        yield left
        left -= length


def on_device(
    batch: Batch, device: torch.device, tokens: int | None = None, context: Axis = SOLO
) -> Iterator[TokenBatch]:
    """The batch in micro-batches of at most `tokens`, each cut along the context axis."""
    for part, lengths in parts(batch, tokens, least=context.size):
        layout = Layout.packed(lengths, device=device)
        yield TokenBatch(
            torch.from_numpy(batch.token_T[part].astype(np.int64)).to(device),
            torch.from_numpy(batch.trained_T[part]).to(device),
            layout if context.size == 1 else layout.piece(Cut(context, layout.tokens)),
        )
