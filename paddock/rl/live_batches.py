"""Batch source over live rollouts: asynchronous RL with bounded staleness.

Every wait has a deadline. An exception in a rollout ends the run and is raised to the waiter.
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
ENGINE_POLL_S = 1.0  # interval of reading the engine load
DESERIALIZE_IN_THREAD_BYTES = 1 << 20  # decoding more would block the event loop


class RolloutStalledError(RuntimeError):
    """No rollout ends although all have deadlines: a bug, or a machine that stands still.

    The message names the rollouts that are waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGroupCounts:
    """Number of groups of one task, by status."""

    in_flight: int = 0
    finished: int = 0  # not trained yet
    trained: int = 0
    filtered: Mapping[str, int] = field(default_factory=dict)  # by reason
    failed: Mapping[str, int] = field(default_factory=dict)  # by reason
    disabled_reason: str = ""  # why no groups are issued; empty if enabled


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """Progress of a run."""

    updates: int
    version: int
    running: int  # rollouts
    limit: int  # of running rollouts
    queued: int  # rollouts
    tasks: Mapping[str, TaskGroupCounts]
    longest_running: tuple[LongRunningRollout, ...]


class LiveBatchSource:
    """BatchSource over an orchestrator. Use it with `async with`.

    On exit running rollouts are cancelled. Unless the run was complete, their groups stay in flight
    in the ledger and are resumed by the next process.
    """

    def __init__(
        self,
        orchestrator: Orchestrator,
        *,
        batches: int | None = None,
        pressure: Callable[[], Awaitable[EngineLoad]] | None = None,
        log_event: LogEvent = lambda *_, **__: None,
    ) -> None:
        """`batches`: total number, None for no limit. `pressure`: reads the engine load; without
        it `max_concurrent` rollouts run at all times."""
        self._o = orchestrator
        self._settings: RolloutSettings = orchestrator.settings
        self._ledger: Ledger = orchestrator.ledger
        self._batches, self._pressure, self._log_event = batches, pressure, log_event
        self._resumed = False
        self._monitor: asyncio.Task[None] | None = None
        self._training: RolloutBatch | None = None  # the batch at the trainer
        self._left_over: list[asyncio.Task[None]] = []  # rollouts cancelled by `finish`
        self.updates = 0

    async def __aenter__(self) -> Self:
        if self._pressure is not None and not self._settings.deterministic:
            self._monitor = asyncio.ensure_future(self._watch_engine(self._pressure))
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._left_over, *self._o.cancel()]
        if self._monitor is not None:
            self._monitor.cancel()
            tasks.append(self._monitor)
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_GRACE_S)

    # -- called by the trainer -------------------------------------------------------------------

    def resume(self, updates: int) -> None:
        """Resume from the checkpoint after so many updates; 0 if there is none."""
        self._ledger.rewind(updates, whole=self._settings.deterministic)
        self._o.resume(updates)
        self.updates = updates
        self._resumed = True
        if self._settings.deterministic and not self._o.is_idle:
            self._log_event(
                "resume", why="the checkpoint was taken with rollouts in flight: results may differ"
            )

    async def next_batch(self) -> RolloutBatch | None:
        if not self._resumed:
            self.resume(0)
        if self._training is not None:
            raise RuntimeError(f"the batch of update {self._training.update} is not trained yet")
        start = asyncio.get_running_loop().time()
        await self.wait_quiescent()
        if self._left() == 0:
            return None
        self._o.current_update = self._o.next_update
        self._o.batches_ahead = min(self._settings.pipeline_depth + 1, self._left())
        self._o.dispatch()
        while isinstance(batch := self._o.compose_batch(), BatchIncomplete):
            await self._wait_for_change(batch)
        update = self._o.next_update
        records = self._o.take_batch(batch)
        self._o.next_update += self._settings.updates_per_batch
        self._o.batches_ahead = min(self._settings.pipeline_depth, self._left())
        self._o.dispatch()
        groups = await self._deserialize([read_serialized_group(self._ledger, r) for r in records])
        self._training = RolloutBatch(
            update=update,
            groups=groups,
            staleness=tuple(staleness_of(group, update) for group in groups),
            wait_s=asyncio.get_running_loop().time() - start,
        )
        return self._training

    async def await_or_fail(self, work: Awaitable[T]) -> T:
        working = asyncio.ensure_future(work)
        failed = asyncio.ensure_future(self._o.broken.wait())
        try:
            await asyncio.wait({working, failed}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                self._raise_failure()
            return working.result()
        finally:
            failed.cancel()
            if not working.done():
                working.cancel()

    def mark_trained(self, batch: RolloutBatch) -> None:
        if batch is not self._training:
            raise RuntimeError(f"the batch of update {batch.update} is not at the trainer")
        until = batch.update + self._settings.updates_per_batch
        self._ledger.record_update(batch.update, until, [group.ordinal for group in batch.groups])
        self.updates, self._training = until, None

    async def wait_quiescent(self) -> None:
        while self._settings.deterministic and not self._o.is_idle:
            await self._wait_for_change(None)
        self._raise_failure()

    def mark_checkpointed(self, updates: int, name: str) -> None:
        self._ledger.record_checkpoint(updates, name)

    def mark_published(self, version: int) -> None:
        if not self._o.version <= version <= self.updates:
            raise LedgerError(
                f"version must be between {self._o.version} (published) and {self.updates}"
                f" (updates done), got {version}"
            )
        self._o.version = version
        self._o.dispatch_between_batches()

    def finish(self) -> None:
        if self._monitor is not None:
            self._monitor.cancel()  # or it could start more rollouts
        self._left_over = self._o.finish()

    # -- called while it runs --------------------------------------------------------------------

    def set_ratios(self, ratios: Mapping[str, float]) -> None:
        """Change the task ratios from the next composed batch on."""
        if not self._resumed:
            raise RuntimeError("call next_batch() or resume() before set_ratios()")
        self._o.set_ratios(ratios)

    def progress(self) -> RunProgress:
        disabled = self._o.task_mixture.disabled(self._o.next_update)
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
                disabled_reason=disabled[task].why if task in disabled else "",
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

    # -- internal --------------------------------------------------------------------------------

    def _left(self) -> int:
        """Batches left to compose."""
        done = self._o.next_update // self._settings.updates_per_batch
        return 1 << 30 if self._batches is None else max(0, self._batches - done)

    def _raise_failure(self) -> None:
        if self._o.failure is not None:
            raise self._o.failure

    async def _wait_for_change(self, missing: BatchIncomplete | None) -> None:
        """Wait until a group ends. Logs the longest-running rollouts every `stall_timeout_s`
        without an end; raises RolloutStalledError when all deadlines have passed."""
        self._raise_failure()
        if len(self._o.executor) == 0:
            raise RolloutStalledError(
                f"no rollout is running and none may start: {self._describe(missing)}"
            )
        loop = asyncio.get_running_loop()
        longest = max(task.settings.attempt_timeout_s for task in self._o.tasks.values())
        start, logged = loop.time(), 0
        while not self._o.changed.is_set():
            quiet = loop.time() - max(start, self._o.executor.ended_at)
            if quiet > longest + 2 * CANCEL_GRACE_S + self._settings.stall_timeout_s:
                raise RolloutStalledError(
                    f"no rollout ended for {quiet:.0f} s: {self._describe(missing)}"
                )
            if quiet >= (logged + 1) * self._settings.stall_timeout_s:
                logged += 1
                self._log_event(
                    "rollouts_stalled", seconds=round(quiet, 1), why=self._describe(missing)
                )
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.stall_timeout_s):
                    await self._o.changed.wait()
        self._o.changed.clear()
        self._raise_failure()

    def _describe(self, missing: BatchIncomplete | None) -> str:
        """The rollouts and groups that are waited for."""
        slow = ", ".join(
            f"{c.session_id} for {c.seconds:.0f} s" for c in self._o.executor.longest_running()
        )
        text = f"running {slow}" if slow else "no rollout is running"
        if missing is not None and missing.unfinished:
            text += f"; the batch needs groups {', '.join(map(str, missing.unfinished[:8]))}"
        if missing is not None and missing.missing:
            short = ", ".join(f"{count} of {task}" for task, count in missing.missing.items())
            text += f"; not started: {short}"
        return text

    async def _deserialize(self, packed: list[SerializedGroup]) -> tuple[RolloutGroup, ...]:
        if sum(group.num_bytes for group in packed) < DESERIALIZE_IN_THREAD_BYTES:
            return tuple(group.deserialize() for group in packed)
        return tuple(await asyncio.to_thread(lambda: [group.deserialize() for group in packed]))

    async def _watch_engine(self, pressure: Callable[[], Awaitable[EngineLoad]]) -> None:
        limit = AdaptiveConcurrencyLimit(
            minimum=self._settings.min_concurrent, maximum=self._settings.max_concurrent
        )
        self._o.executor.limit = limit.value
        try:
            while True:
                with suppress(TimeoutError):  # an engine that does not answer has no new load
                    async with asyncio.timeout(ENGINE_POLL_S):
                        limit.update(await pressure(), full=self._o.executor.is_full)
                if self._o.executor.limit != limit.value:
                    self._o.executor.limit = limit.value
                    if self._resumed:
                        self._o.dispatch()
                await asyncio.sleep(ENGINE_POLL_S)
        except Exception as error:
            self._o.fail(error)
