"""Batch sources of the trainer: protocol, and replay of the batches in a ledger."""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from paddock.journal import (
    LEDGER_FORMAT,
    GroupRecord,
    Ledger,
    LedgerError,
    LedgerView,
    unpack_rollout,
)
from paddock.rollout import RolloutGroup

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """Groups of one batch, ordered by task and number."""

    update: int  # number of updates done before this batch
    groups: tuple[RolloutGroup, ...]
    staleness: tuple[int, ...]  # of each group's oldest token, in updates, when training starts
    wait_s: float = 0.0  # time `next_batch` took


class BatchSource(Protocol):
    """What the trainer needs, in the order of its calls."""

    async def next_batch(self) -> RolloutBatch | None:
        """The next batch; None if there are no more. Raises the error that ended the run."""

    async def await_or_fail(self, work: Awaitable[T]) -> T:
        """The result of `work`. Raises at once if the run fails meanwhile."""

    def mark_trained(self, batch: RolloutBatch) -> None:
        """All updates of the batch have been done."""

    async def wait_quiescent(self) -> None:
        """Wait until weights may be saved and published: in deterministic mode, until no rollout
        is in flight."""

    def mark_checkpointed(self, updates: int, name: str) -> None:
        """The checkpoint after so many updates is on disk."""

    def mark_published(self, version: int) -> None:
        """Weight sync done: engines sample with this version from now on."""

    def finish(self) -> None:
        """The run is complete: no further batch will be requested."""


@dataclass(frozen=True, slots=True)
class SerializedGroup:
    """A group as bytes of the ledger, not yet decoded."""

    record: GroupRecord
    rollouts: Sequence[bytes]

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.rollouts))

    def deserialize(self) -> RolloutGroup:
        return RolloutGroup(
            ordinal=self.record.ordinal,
            task=self.record.task,
            number=self.record.number,
            rollouts=tuple(unpack_rollout(data, self.record.ordinal) for data in self.rollouts),
        )


def read_serialized_group(ledger: Ledger, record: GroupRecord) -> SerializedGroup:
    return SerializedGroup(record, list(ledger.packed_rollouts(record.ordinal).values()))


def staleness_of(group: RolloutGroup, update: int) -> int:
    """Staleness of the oldest token of a group, in updates, when trained at `update`."""
    oldest = group.oldest_version
    return 0 if oldest is None else update - oldest


class LedgerBatchSource:
    """Replays the trained batches of a ledger in order, without engines or environments.

    The ledger may belong to a live run: it is opened read-only.
    """

    def __init__(self, path: str | Path, *, first: int = 0) -> None:
        """Start with the batch of update `first`."""
        self._ledger = LedgerView(path)
        if (version := self._ledger.get_metadata("format")) != LEDGER_FORMAT:
            self._ledger.close()
            raise LedgerError(f"{path}: expected ledger format {LEDGER_FORMAT}, got {version}")
        self._batches = iter(self._ledger.batches(first))

    async def next_batch(self) -> RolloutBatch | None:
        row = next(self._batches, None)
        if row is None:
            self._ledger.close()
            return None
        update, _, records = row
        groups = tuple(
            read_serialized_group(self._ledger, record).deserialize() for record in records
        )
        staleness = tuple(staleness_of(group, update) for group in groups)
        return RolloutBatch(update=update, groups=groups, staleness=staleness)

    async def await_or_fail(self, work: Awaitable[T]) -> T:
        return await work

    def mark_trained(self, batch: RolloutBatch) -> None:
        pass

    async def wait_quiescent(self) -> None:
        pass

    def mark_checkpointed(self, updates: int, name: str) -> None:
        pass

    def mark_published(self, version: int) -> None:
        pass

    def finish(self) -> None:
        pass
