"""Rows of data as tensors, whole or in parts that fit the device.

T tokens of packed documents.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paddock.data import Batch
from paddock.model import Layout

IGNORED = -100


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """Documents side by side. `trained_T` says which tokens count as targets."""

    token_T: Tensor
    trained_T: Tensor
    layout: Layout

    def targets(self, ahead: int) -> Tensor:
        """The token `ahead` places on, or IGNORED where the document ends or it does not count.

        >>> batch = TokenBatch(torch.tensor([5, 6, 7, 8]), torch.tensor([False, True, True, True]),
        ...                    Layout.packed([3, 1]))
        >>> batch.targets(1).tolist()
        [6, 7, -100, -100]
        """
        target_T = torch.full_like(self.token_T, IGNORED)
        counted_T = torch.where(self.trained_T, self.token_T, IGNORED)
        for span in self.layout.spans:
            start, stop = span.query, span.query + span.queries
            if span.queries > ahead:
                target_T[start : stop - ahead] = counted_T[start + ahead : stop]
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


def parts(batch: Batch, tokens: int | None) -> Iterator[tuple[slice, tuple[int, ...]]]:
    """Cut between documents into runs of at most `tokens`, a longer document alone."""
    start = stop = 0
    lengths: list[int] = []
    for length in batch.lengths:
        if lengths and tokens is not None and stop - start + length > tokens:
            yield slice(start, stop), tuple(lengths)
            start, lengths = stop, []
        lengths.append(length)
        stop += length
    if lengths:
        yield slice(start, stop), tuple(lengths)


def on_device(
    batch: Batch, device: torch.device, tokens: int | None = None
) -> Iterator[TokenBatch]:
    """The batch in micro-batches of at most `tokens`."""
    for part, lengths in parts(batch, tokens):
        yield TokenBatch(
            torch.from_numpy(batch.token_T[part].astype(np.int64)).to(device),
            torch.from_numpy(batch.trained_T[part]).to(device),
            Layout.packed(lengths, device=device),
        )
