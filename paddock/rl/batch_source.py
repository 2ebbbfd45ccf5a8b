"""Where a learner takes its batches from: rollouts that go on meanwhile, or an old ledger."""

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
    """Groups to be trained together, by task and number."""

    update: int  # the first it is trained at: how many were done before
    groups: tuple[RolloutGroup, ...]
    staleness: tuple[int, ...]  # of each group's oldest token, in updates, when training begins
    wait_s: float = 0.0  # by whoever asked for it


class BatchSource(Protocol):
    """What a learner needs, in the order in which it calls."""

    async def next_batch(self) -> RolloutBatch | None:
        """None when there will be no more. Raises what ended the run."""

    async def await_or_fail(self, work: Awaitable[T]) -> T:
        """The result of `work`, or at once what ended the run meanwhile."""

    def mark_trained(self, batch: RolloutBatch) -> None:
        """All updates of the batch are done."""

    async def wait_quiescent(self) -> None:
        """Until weights may be saved and published. Where runs are to be resumed bit by bit, that
        is when nothing is in flight."""

    def mark_checkpointed(self, updates: int, name: str) -> None:
        """The state after so many updates is on disk."""

    def mark_published(self, version: int) -> None:
        """From now on, engines sample with these weights."""

    def finish(self) -> None:
        """The run is complete: no batch will be asked for any more."""


@dataclass(frozen=True, slots=True)
class SerializedGroup:
    """A group that is still bytes."""

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


def read_serialized_group(ledger: Ledger, entry: GroupRecord) -> SerializedGroup:
    return SerializedGroup(entry, list(ledger.packed_rollouts(entry.ordinal).values()))


def staleness_of(group: RolloutGroup, update: int) -> int:
    oldest = group.oldest_version
    return 0 if oldest is None else update - oldest


class LedgerBatchSource:
    """The batches that a ledger says were trained, again and in the same order: a Queue without
    engines or worlds. The ledger is another run's, perhaps one that goes on: it is only read."""

    def __init__(self, path: str | Path, *, first: int = 0) -> None:
        """From the batch on that begins with update `first`."""
        self._ledger = LedgerView(path)
        if (found := self._ledger.get_metadata("format")) != LEDGER_FORMAT:
            self._ledger.close()
            raise LedgerError(
                f"{path}: the ledger has format {found}, this reads format {LEDGER_FORMAT}"
            )
        self._batches = iter(self._ledger.batches(first))

    async def next_batch(self) -> RolloutBatch | None:
        found = next(self._batches, None)
        if found is None:
            self._ledger.close()
            return None
        update, _, entries = found
        groups = tuple(
            read_serialized_group(self._ledger, entry).deserialize() for entry in entries
        )
        lags = tuple(staleness_of(group, update) for group in groups)
        return RolloutBatch(update=update, groups=groups, staleness=lags)

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
