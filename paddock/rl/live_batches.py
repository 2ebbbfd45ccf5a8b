"""Rollouts into batches while the trainer works: the Queue that is fed by an orchestrator.

Every wait has a deadline. What an attempt raises ends the run, and is raised to whoever waits.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self, TypeVar

from paddock.journal import Ledger, LedgerError
from paddock.rl.batch_source import (
    RolloutBatch,
    SerializedGroup,
    read_serialized_group,
    staleness_of,
)
from paddock.rollout import (
    CANCEL_GRACE_S,
    AdaptiveConcurrencyLimit,
    BatchIncomplete,
    EngineLoad,
    LogEvent,
    LongRunningRollout,
    Orchestrator,
    RolloutGroup,
    RolloutSettings,
)

T = TypeVar("T")
ENGINE_POLL_S = 1.0  # between two looks at the engine
DESERIALIZE_IN_THREAD_BYTES = 1 << 20  # packed bytes whose unpacking would hold up the loop


class RolloutStalledError(RuntimeError):
    """Nothing will happen any more, though everything has a deadline: a bug, or a machine that
    stands still. The message names who is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGroupCounts:
    """One task, in groups."""

    in_flight: int = 0
    finished: int = 0  # and not trained yet
    trained: int = 0
    filtered: Mapping[str, int] = field(default_factory=dict)  # by reason
    failed: Mapping[str, int] = field(default_factory=dict)  # by reason
    disabled_reason: str = ""  # why it gets nothing now


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """Where a run stands."""

    updates: int
    version: int
    running: int  # attempts
    limit: int  # of them
    queued: int  # attempts
    tasks: Mapping[str, TaskGroupCounts]
    longest_running: tuple[LongRunningRollout, ...]  # the attempts that have been running longest


class LiveBatchSource:
    """A Queue over live rollouts. Use it as `async with`; on leaving, what runs is cancelled and
    stays in flight in the ledger, for the next call to take up, unless the run was complete."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        *,
        batches: int | None = None,
        pressure: Callable[[], Awaitable[EngineLoad]] | None = None,
        tell: LogEvent = lambda *_, **__: None,
    ) -> None:
        """`batches`: how many there will be in all. `pressure`: how the engine fares; without it,
        as many attempts run as the pace allows."""
        self._o = orchestrator
        self._pace: RolloutSettings = orchestrator.settings
        self._ledger: Ledger = orchestrator.ledger
        self._batches, self._pressure, self._tell = batches, pressure, tell
        self._resumed = False
        self._monitor: asyncio.Task[None] | None = None
        self._out: RolloutBatch | None = None  # at the trainer
        self._left_over: list[asyncio.Task[None]] = []  # attempts that were cancelled by `complete`
        self.updates = 0

    async def __aenter__(self) -> Self:
        if self._pressure is not None and not self._pace.deterministic:
            self._monitor = asyncio.ensure_future(self._watch_engine(self._pressure))
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._left_over, *self._o.cancel()]
        if self._monitor is not None:
            self._monitor.cancel()
            tasks.append(self._monitor)
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_GRACE_S)

    # -- the learner's side ----------------------------------------------------------------------

    def resume(self, updates: int) -> None:
        """Go on from a checkpoint after so many updates; 0 where there is none yet."""
        self._ledger.rewind(updates, whole=self._pace.deterministic)
        self._o.resume(updates)
        self.updates = updates
        self._resumed = True
        if self._pace.deterministic and not self._o.is_idle:
            self._tell("resume", why="the checkpoint was not taken at a border: bits may differ")

    async def next_batch(self) -> RolloutBatch | None:
        if not self._resumed:
            self.resume(0)
        if self._out is not None:
            raise RuntimeError(f"the batch of update {self._out.update} has not been trained yet")
        began = asyncio.get_running_loop().time()
        await self.wait_quiescent()
        if self._left() == 0:
            return None
        self._o.current_update = self._o.next_update
        self._o.batches_ahead = min(self._pace.pipeline_depth + 1, self._left())
        self._o.dispatch()
        while isinstance(found := self._o.compose_batch(), BatchIncomplete):
            await self._progress(found)
        update = self._o.next_update
        taken = self._o.take_batch(found)
        self._o.next_update += self._pace.updates_per_batch
        self._o.batches_ahead = min(self._pace.pipeline_depth, self._left())
        self._o.dispatch()
        groups = await self._opened([read_serialized_group(self._ledger, entry) for entry in taken])
        self._out = RolloutBatch(
            update=update,
            groups=groups,
            staleness=tuple(staleness_of(group, update) for group in groups),
            wait_s=asyncio.get_running_loop().time() - began,
        )
        return self._out

    async def await_or_fail(self, work: Awaitable[T]) -> T:
        doing = asyncio.ensure_future(work)
        broken = asyncio.ensure_future(self._o.broken.wait())
        try:
            await asyncio.wait({doing, broken}, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                self._raise_failure()
            return doing.result()
        finally:
            broken.cancel()
            if not doing.done():
                doing.cancel()

    def mark_trained(self, batch: RolloutBatch) -> None:
        if batch is not self._out:
            raise RuntimeError(f"the batch of update {batch.update} is not at the trainer")
        until = batch.update + self._pace.updates_per_batch
        self._ledger.record_update(batch.update, until, [group.ordinal for group in batch.groups])
        self.updates, self._out = until, None

    async def wait_quiescent(self) -> None:
        while self._pace.deterministic and not self._o.is_idle:
            await self._progress(None)
        self._raise_failure()

    def mark_checkpointed(self, updates: int, name: str) -> None:
        self._ledger.record_checkpoint(updates, name)

    def mark_published(self, version: int) -> None:
        if not self._o.version <= version <= self.updates:
            raise LedgerError(
                f"version {version} was pushed after {self.updates} updates and version"
                f" {self._o.version}: a version is the number of updates behind it"
            )
        self._o.version = version
        self._o.dispatch_between_batches()

    def finish(self) -> None:
        if self._monitor is not None:
            self._monitor.cancel()  # or it may start more
        self._left_over = self._o.finish()

    # -- the watcher's side ----------------------------------------------------------------------

    def set_ratios(self, ratios: Mapping[str, float]) -> None:
        """From the next batch on that is made."""
        if not self._resumed:
            raise RuntimeError("ratios change in a run: ask for a batch, or resume, first")
        self._o.set_ratios(ratios)

    def progress(self) -> RunProgress:
        aside = self._o.task_mixture.disabled(self._o.next_update)
        counts = self._ledger.counts_by_reason()
        tasks = {}
        for task in self._o.tasks:
            of = {(status, why): n for (name, status, why), n in counts.items() if name == task}
            tasks[task] = TaskGroupCounts(
                in_flight=of.get(("in flight", ""), 0),
                finished=of.get(("finished", ""), 0),
                trained=of.get(("trained", ""), 0),
                filtered={why: n for (status, why), n in of.items() if status == "filtered"},
                failed={why: n for (status, why), n in of.items() if status == "failed"},
                disabled_reason=aside[task].why if task in aside else "",
            )
        return RunProgress(
            updates=self.updates,
            version=self._o.version,
            running=len(self._o.executor),
            limit=self._o.executor.limit,
            queued=self._o.num_queued(),
            tasks=tasks,
            longest_running=tuple(self._o.executor.longest_running()),
        )

    # -- within ----------------------------------------------------------------------------------

    def _left(self) -> int:
        """How many batches are still to be made."""
        made = self._o.next_update // self._pace.updates_per_batch
        return 1 << 30 if self._batches is None else max(0, self._batches - made)

    def _raise_failure(self) -> None:
        if self._o.failure is not None:
            raise self._o.failure

    async def _progress(self, missing: BatchIncomplete | None) -> None:
        """Until something has changed. Tells who is waited for when nothing ends for long, and
        gives up when even deadlines pass without an end."""
        self._raise_failure()
        if len(self._o.executor) == 0:
            raise RolloutStalledError(f"nothing runs and nothing may begin: {self._said(missing)}")
        loop = asyncio.get_running_loop()
        longest = max(work.settings.attempt_timeout_s for work in self._o.tasks.values())
        began, told = loop.time(), 0
        while not self._o.changed.is_set():
            quiet = loop.time() - max(began, self._o.executor.ended_at)
            if quiet > longest + 2 * CANCEL_GRACE_S + self._pace.stall_timeout_s:
                raise RolloutStalledError(
                    f"no attempt ended for {quiet:.0f} s: {self._said(missing)}"
                )
            if quiet >= (told + 1) * self._pace.stall_timeout_s:
                told += 1
                self._tell("stall", seconds=round(quiet, 1), why=self._said(missing))
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pace.stall_timeout_s):
                    await self._o.changed.wait()
        self._o.changed.clear()
        self._raise_failure()

    def _said(self, missing: BatchIncomplete | None) -> str:
        """Who is waited for."""
        slow = ", ".join(
            f"{c.session_id} for {c.seconds:.0f} s" for c in self._o.executor.longest_running()
        )
        text = f"running {slow}" if slow else "no attempt runs"
        if missing is not None and missing.unfinished:
            text += f"; the batch needs groups {', '.join(map(str, missing.unfinished[:8]))}"
        if missing is not None and missing.missing:
            short = ", ".join(f"{count} of {task}" for task, count in missing.missing.items())
            text += f"; to be begun: {short}"
        return text

    async def _opened(self, packed: list[SerializedGroup]) -> tuple[RolloutGroup, ...]:
        if sum(group.num_bytes for group in packed) < DESERIALIZE_IN_THREAD_BYTES:
            return tuple(group.deserialize() for group in packed)
        return tuple(await asyncio.to_thread(lambda: [group.deserialize() for group in packed]))

    async def _watch_engine(self, pressure: Callable[[], Awaitable[EngineLoad]]) -> None:
        limit = AdaptiveConcurrencyLimit(
            least=self._pace.min_concurrent, most=self._pace.max_concurrent
        )
        self._o.executor.limit = limit.value
        try:
            while True:
                with suppress(TimeoutError):  # an engine that does not answer says nothing new
                    async with asyncio.timeout(ENGINE_POLL_S):
                        limit.update(await pressure(), full=self._o.executor.is_full)
                if self._o.executor.limit != limit.value:
                    self._o.executor.limit = limit.value
                    if self._resumed:
                        self._o.dispatch()
                await asyncio.sleep(ENGINE_POLL_S)
        except Exception as error:
            self._o.fail(error)
