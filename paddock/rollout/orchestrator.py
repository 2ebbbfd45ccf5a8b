"""Many tasks at once: which groups are issued, which attempts run, and how each group ends.

One thread, one event loop. Nothing here waits: every event (an attempt ended, a batch was taken,
new weights, other ratios) is followed by `pump`, which issues and starts what may be started now.
Whoever wants to wait watches `changed`.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from paddock.journal import UNUSED_REASON, GroupRecord, Ledger, LedgerError
from paddock.records import Trajectory, json_codec
from paddock.rollout.batch_composer import (
    BatchContext,
    BatchIncomplete,
    BatchReady,
    LiveGroup,
    compose_batch,
    groups_allowed,
    is_stale,
    tasks_to_issue,
)
from paddock.rollout.deterministic import RequestBarrier
from paddock.rollout.executor import ActiveRollout, RolloutExecutor
from paddock.rollout.group import RolloutGroup, TaskSpec, group_failure_reason, oldest_version
from paddock.rollout.in_flight import GroupInFlight
from paddock.rollout.settings import RolloutSettings
from paddock.rollout.task_health import STALE, RunAbortedError, TaskHealthMonitor
from paddock.rollout.task_mixture import TaskMixture

LogEvent = Callable[..., None]  # kind, and what there is to say about it


class Orchestrator:
    """Used by one thread, that of the loop it runs in. `tell` hears what a person may want to know;
    `waves` keep lock-step."""

    def __init__(
        self,
        works: Mapping[str, TaskSpec],
        pace: RolloutSettings,
        ledger: Ledger,
        *,
        seed: int,
        tell: LogEvent = lambda *_, **__: None,
        waves: RequestBarrier | None = None,
    ) -> None:
        if not works:
            raise RunAbortedError("there is no task to run")
        if pace.deterministic != (waves is not None):
            raise ValueError("lock-step is kept by waves: give both or neither")
        self.tasks, self.settings, self.ledger = dict(works), pace, ledger
        self.task_mixture = TaskMixture(
            ledger, {task: work.settings.ratio for task, work in works.items()}
        )
        self.executor = RolloutExecutor(
            self.tasks, seed=seed, waves=waves, ended=self._ended, broken=self.fail
        )
        self.executor.limit = pace.max_concurrent
        self.next_update = 0  # the first of the next batch that will be made
        self.current_update = 0  # the first of the batch that is being made or trained
        self.version = 0  # what engines serve
        self.batches_ahead = 0  # how many batches may be alive
        self.changed = asyncio.Event()
        self.broken = asyncio.Event()
        self.failure: BaseException | None = None  # what broke it
        self._seed, self._tell = seed, tell
        self._flights: dict[
            int, GroupInFlight
        ] = {}  # every group that is alive, in the order of issue
        self._numbers: Counter[str] = Counter()  # the next number of each task
        self._ordinal = 0
        self._taken: Counter[str] = Counter()  # in batches, since the present shares hold
        self._taken_since = 0
        self._health = self._fresh_health()

    # -- where things stand ----------------------------------------------------------------------

    def live_groups(self) -> list[LiveGroup]:
        return [flight.live_group for flight in self._flights.values()]

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight."""
        return not len(self.executor) and all(flight.finished for flight in self._flights.values())

    def num_queued(self) -> int:
        return sum(len(flight.queued) for flight in self._flights.values())

    def batch_context(self) -> BatchContext:
        weights, since = (
            self.task_mixture.weights(self.next_update),
            self.task_mixture.effective_since(self.next_update),
        )
        if since != self._taken_since:
            self._taken, self._taken_since = Counter(), since
        return BatchContext(
            update=self.next_update,
            version=self.version,
            task_weights=weights,
            groups_taken=dict(self._taken),
        )

    # -- events ----------------------------------------------------------------------------------

    def resume(self, updates: int) -> None:
        """Take up what the ledger says is alive after so many updates. What runs no more is made
        again, by the same assignments."""
        if self.ledger.get_metadata("seed") not in (None, self._seed):
            raise LedgerError(
                f"the ledger was begun with seed {self.ledger.get_metadata('seed')}, not {self._seed}"
            )
        self.ledger.set_metadata("seed", self._seed)
        self.next_update = self.current_update = self.version = updates
        self.task_mixture.resume(updates)
        self._taken_since = self.task_mixture.effective_since(updates)
        entries = self.ledger.groups()
        self._ordinal = 1 + max((entry.ordinal for entry in entries), default=-1)
        self._numbers = Counter()
        self._taken = Counter(
            e.task for e in entries if e.trained is not None and e.trained >= self._taken_since
        )
        self._health = self._fresh_health()
        self._health.restore(entry for entry in entries if entry.status != "in flight")
        for entry in entries:
            self._numbers[entry.task] = max(self._numbers[entry.task], entry.number + 1)
            if entry.status in ("in flight", "finished"):
                self._take_up(entry)

    def take_batch(self, ready: BatchReady) -> list[GroupRecord]:
        """A batch leaves for the trainer."""
        gone = [self._flights.pop(ordinal).record for ordinal in ready.ordinals]
        self._taken.update(entry.task for entry in gone)
        return gone

    def set_ratios(self, ratios: Mapping[str, float]) -> None:
        """From the next batch on that is made."""
        self.task_mixture.request_ratios(ratios, since=self.next_update, now=self.current_update)
        self._tell("ratios", ratios=dict(ratios), update=self.next_update)
        self.dispatch_between_batches()
        self.changed.set()

    def compose_batch(self) -> BatchReady | BatchIncomplete:
        """The next batch, if it is there; what is too old for it is thrown away first."""
        stale = [
            f
            for f in self._flights.values()
            if is_stale(self.settings, f.oldest_version, self.next_update)
        ]
        for flight in stale:
            self._drop(flight)
        if stale:
            self.dispatch()
        return compose_batch(self.live_groups(), self.batch_context(), self.settings)

    def dispatch(self) -> None:
        """Issue what the next batches lack, and start what may start."""
        if self.failure is None:
            moment, alive = self.batch_context(), self.live_groups()
            lacking = tasks_to_issue(alive, moment, self.settings, ahead=self.batches_ahead)
            most = max(0, groups_allowed(alive, moment, self.settings, begun=False))
            self._issue([*self._probes(alive), *lacking][:most])
            self._start()

    def dispatch_between_batches(self) -> None:
        """After what happens between two batches. In lock-step, the next batch begins all."""
        if not self.settings.deterministic:
            self.dispatch()

    def fail(self, error: BaseException) -> None:
        """The run cannot go on. The first reason counts; everything that runs is cancelled."""
        if self.failure is None:
            self.failure = error
            self.cancel()
        self.broken.set()
        self.changed.set()

    def cancel(self) -> list["asyncio.Task[None]"]:
        """Everything that runs; the ledger knows it as in flight."""
        return self.executor.cancel(self._flights.values())

    def finish(self) -> list["asyncio.Task[None]"]:
        """The run is complete: whatever is alive will not be trained, and the ledger says so.
        Returns what was cancelled."""
        cancelled = self.cancel()
        with self.ledger.transaction():
            for ordinal in self._flights:
                self.ledger.end_group(ordinal, "filtered", UNUSED_REASON)
        self._flights.clear()
        return cancelled

    # -- issuing ---------------------------------------------------------------------------------

    def _issue(self, tasks: Sequence[str]) -> None:
        entries = []
        for task in tasks:
            size = self.tasks[task].settings.group_size
            entry = GroupRecord(
                ordinal=self._ordinal,
                task=task,
                number=self._numbers[task],
                size=size,
                issued=self.current_update,
            )
            self._ordinal += 1
            self._numbers[task] += 1
            entries.append(entry)
            queued = list(reversed(range(size)))
            self._flights[entry.ordinal] = GroupInFlight(record=entry, queued=queued)
        if entries:
            self.ledger.issue(entries)

    def _probes(self, alive: Sequence[LiveGroup]) -> list[str]:
        """Tasks that were set aside and have rested: one group of each, to see."""
        there, asked = (
            {group.task for group in alive},
            self.task_mixture.requested(self.next_update),
        )
        rest = self.settings.retry_disabled_after * self.settings.updates_per_batch
        return [
            task
            for task, row in self.task_mixture.disabled(self.next_update).items()
            if asked.get(task) and task not in there and self.next_update >= row.since + rest
        ]

    def _take_up(self, entry: GroupRecord) -> None:
        """A group of the past that is alive."""
        if entry.task not in self.tasks:
            self.ledger.end_group(
                entry.ordinal, "filtered", "its task is not in the recipe any more"
            )
            return
        try:
            done = self.ledger.rollouts(entry.ordinal)
        except (
            json_codec.RecordDecodeError
        ) as error:  # a record that no rollout could write any more
            self._discard(entry, f"unreadable: {error}")
            return
        flight = GroupInFlight(record=entry, finished=entry.status == "finished")
        for branches in done.values():
            flight.note_version(oldest_version(branches))
        if not flight.finished:
            flight.done = done
            flight.queued = [m for m in reversed(range(entry.size)) if m not in done]
        self._flights[entry.ordinal] = flight
        if not flight.finished and flight.is_done:  # killed before its end was written
            self._end(flight)

    def _discard(self, entry: GroupRecord, why: str) -> None:
        """A group of the past that cannot be trained: the run goes on without it."""
        self.ledger.end_group(entry.ordinal, "filtered", why)
        self._tell("group_dropped", group=entry.ordinal, task=entry.task, why=why)

    # -- running ---------------------------------------------------------------------------------

    def _start(self) -> None:
        """Attempts of groups that have begun come first: their tokens grow old."""
        if self.executor.is_full:
            return
        waiting = [flight for flight in self._flights.values() if flight.queued]
        for flight in waiting:
            if flight.oldest_version is not None:
                self.executor.start(flight, self.version)
        fresh = [flight for flight in waiting if flight.oldest_version is None]
        if self.executor.is_full or not fresh:
            return
        left = groups_allowed(self.live_groups(), self.batch_context(), self.settings, begun=True)
        for flight in fresh:
            if self.executor.is_full or left <= 0:
                return
            self.executor.start(flight, self.version)
            left -= flight.oldest_version is not None

    def _ended(self, run: ActiveRollout, branches: tuple[Trajectory, ...]) -> None:
        flight = run.group
        if self.failure is not None or flight.record.ordinal not in self._flights:
            return
        flight.note_version(oldest_version(branches))
        flight.done[run.spec.member] = branches
        self.ledger.record_rollout(flight.record.ordinal, run.spec.member, branches)
        if flight.is_done:
            self._end(flight)
            self.dispatch()
            self.changed.set()
        else:
            self._start()

    # -- ending ----------------------------------------------------------------------------------

    def _end(self, flight: GroupInFlight) -> None:
        """Every attempt of the group has ended: what is it good for?"""
        entry = flight.record
        group: RolloutGroup = flight.group
        flight.done = {}  # the ledger has them; memory is for what runs
        if group.oldest_version is not None:
            flight.oldest_version = (
                group.oldest_version
            )  # so far, when it began: its tokens may be younger
        reason = group_failure_reason(group.outcomes)
        if not reason and is_stale(self.settings, flight.oldest_version, self.next_update):
            self._drop(flight)
            return
        status: Literal["failed", "filtered", "finished"] = "failed"
        if not reason:
            reason = self.tasks[entry.task].group_filter(group)
            status = "filtered" if reason else "finished"
        self.ledger.end_group(entry.ordinal, status, reason)
        flight.finished = status == "finished"
        if not flight.finished:
            del self._flights[entry.ordinal]
        self._judge(entry.task, status, reason)

    def _judge(self, task: str, status: str, reason: str) -> None:
        why = self._health.record_group(task, status, reason)
        is_aside = task in self.task_mixture.disabled(self.next_update)
        if status == "finished" and is_aside:
            self.task_mixture.enable(task, since=self.next_update, now=self.current_update)
            self._tell("task_back", task=task, update=self.next_update)
        elif why and self.tasks[task].settings.required:
            raise RunAbortedError(f"task '{task}' cannot be done without: {why}")
        elif why:
            self.task_mixture.disable(task, why, since=self.next_update, now=self.current_update)
            if not is_aside:
                self._tell("task_aside", task=task, why=why, update=self.next_update)

    def _drop(self, flight: GroupInFlight) -> None:
        entry = flight.record
        lag = self.next_update + self.settings.updates_per_batch - 1 - (flight.oldest_version or 0)
        reason = f"{STALE}: {lag} updates old, at most {self.settings.max_staleness} are allowed"
        self.ledger.end_group(entry.ordinal, "filtered", reason)
        del self._flights[entry.ordinal]
        self.executor.cancel_group(flight)
        if self.settings.on_stale == "wait":  # only an engine that serves old weights can do this
            self._tell("stale", group=entry.ordinal, task=entry.task, why=reason)
            self._judge(entry.task, "failed", reason)

    def _fresh_health(self) -> TaskHealthMonitor:
        return TaskHealthMonitor({task: work.settings for task, work in self.tasks.items()})
