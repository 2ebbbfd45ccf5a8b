"""Orchestrator: issues groups of several tasks, runs their rollouts, records how each group ends.

One thread, one event loop. Nothing here waits: every event (a rollout ended, a batch was taken,
weight sync, new ratios) is followed by `dispatch`, which issues and starts what may start now.
Callers wait for `changed`.
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
from paddock.rollout.group import (
    RolloutGroup,
    TaskSpec,
    group_failure_reason,
    group_rewards,
    oldest_version,
)
from paddock.rollout.in_flight import GroupInFlight
from paddock.rollout.prompt_weights import PromptWeights
from paddock.rollout.settings import RolloutSettings
from paddock.rollout.task_costs import TaskCosts
from paddock.rollout.task_health import STALE, RunAbortedError, TaskHealthMonitor
from paddock.rollout.task_mixture import TaskMixture

LogEvent = Callable[..., None]  # kind of the event, and its fields


class Orchestrator:
    """Not thread-safe: used only in the thread of its event loop.

    `log_event` gets events for the journal; `barrier` is needed in deterministic mode only.
    """

    def __init__(
        self,
        tasks: Mapping[str, TaskSpec],
        settings: RolloutSettings,
        ledger: Ledger,
        *,
        seed: int,
        log_event: LogEvent = lambda *_, **__: None,
        barrier: RequestBarrier | None = None,
    ) -> None:
        if not tasks:
            raise RunAbortedError("there are no tasks to run")
        if settings.deterministic != (barrier is not None):
            raise ValueError("a barrier is required in deterministic mode, and only there")
        self.tasks, self.settings, self.ledger = dict(tasks), settings, ledger
        self.task_mixture = TaskMixture(
            ledger, {name: task.settings.ratio for name, task in tasks.items()}
        )
        self.executor = RolloutExecutor(
            self.tasks, seed=seed, barrier=barrier, on_end=self._ended, on_error=self.fail
        )
        self.executor.limit = settings.max_concurrent
        self.next_update = 0  # first update of the next batch to compose
        self.current_update = 0  # first update of the batch being composed or trained
        self.version = 0  # weight version that engines serve
        self.batches_ahead = 0  # number of batches that may be in flight
        self.changed = asyncio.Event()
        self.broken = asyncio.Event()
        self.failure: BaseException | None = None  # why the run ended
        self._seed, self._log_event = seed, log_event
        self._groups: dict[int, GroupInFlight] = {}  # live groups, in order of issue
        self._numbers: Counter[str] = Counter()  # next group number of each task
        self._ordinal = 0
        self._costs = TaskCosts(ledger, settings.ratio_unit)
        self._health = self._new_health_monitor()
        self._prompt_weights = {name: self._new_weights(name) for name in tasks}

    # -- state -----------------------------------------------------------------------------------

    def live_groups(self) -> list[LiveGroup]:
        return [group.live_group for group in self._groups.values()]

    @property
    def is_idle(self) -> bool:
        """Whether no rollout is running and every live group is finished."""
        return not len(self.executor) and all(group.finished for group in self._groups.values())

    def num_queued(self, task: str | None = None) -> int:
        """Rollouts that were issued and not started, of a task or in all."""
        groups = self._groups.values()
        return sum(len(group.queued) for group in groups if task in (None, group.record.task))

    def batch_context(self) -> BatchContext:
        weights = self.task_mixture.weights(self.next_update)
        self._costs.count_from(self.task_mixture.effective_since(self.next_update))
        return BatchContext(
            update=self.next_update,
            version=self.version,
            task_weights=weights,
            taken=dict(self._costs.taken),
            costs=self._costs.per_group(weights),
        )

    # -- events ----------------------------------------------------------------------------------

    def resume(self, updates: int) -> None:
        """Resume the live groups of the ledger after so many updates.

        Rollouts that were running are started again with the same specs, hence the same seeds.
        """
        if self.ledger.get_metadata("seed") not in (None, self._seed):
            raise LedgerError(
                f"the ledger has seed {self.ledger.get_metadata('seed')}, the run has {self._seed}"
            )
        self.ledger.set_metadata("seed", self._seed)
        self.next_update = self.current_update = self.version = updates
        self.task_mixture.resume(updates)
        records = self.ledger.groups()
        self._costs.resume(records, self.task_mixture.effective_since(updates))
        self._ordinal = 1 + max((record.ordinal for record in records), default=-1)
        self._numbers = Counter()
        self._health = self._new_health_monitor()
        self._health.restore(record for record in records if record.status != "in flight")
        self._prompt_weights = {name: self._new_weights(name) for name in self.tasks}
        if any(self._prompt_weights.values()):
            for ended in self.ledger.ended_rewards():
                self._record_rewards(*ended)
        for record in records:
            self._numbers[record.task] = max(self._numbers[record.task], record.number + 1)
            if record.status in ("in flight", "finished"):
                self._resume_group(record)

    def take_batch(self, ready: BatchReady) -> list[GroupRecord]:
        """Hand the groups of a batch to the trainer."""
        taken = [self._groups.pop(ordinal).record for ordinal in ready.ordinals]
        self._costs.take(taken)
        return taken

    def put_task(self, name: str, spec: TaskSpec) -> None:
        """Add a task, without a ratio yet, or change how its next rollouts are run."""
        self.tasks[name] = spec
        self._health.watch(name, spec.settings)
        self._prompt_weights.setdefault(name, self._new_weights(name))
        self.task_mixture.add_task(name)

    def set_ratios(self, ratios: Mapping[str, float]) -> None:
        """Change the task ratios from the next composed batch on."""
        self.task_mixture.request_ratios(ratios, since=self.next_update, now=self.current_update)
        self._log_event("task_ratios", ratios=dict(ratios), update=self.next_update)
        self.dispatch_between_batches()
        self.changed.set()

    def compose_batch(self) -> BatchReady | BatchIncomplete:
        """The next batch, if it is complete. Groups that are too stale for it are dropped first."""
        stale = [
            f
            for f in self._groups.values()
            if is_stale(self.settings, f.oldest_version, self.next_update)
        ]
        for group in stale:
            self._drop(group)
        if stale:
            self.dispatch()
        return compose_batch(self.live_groups(), self.batch_context(), self.settings)

    def dispatch(self) -> None:
        """Issue the groups that the next batches lack, and start rollouts within the limits."""
        if self.failure is None:
            context, live = self.batch_context(), self.live_groups()
            missing = tasks_to_issue(live, context, self.settings, ahead=self.batches_ahead)
            limit = max(0, groups_allowed(live, context, self.settings, started_only=False))
            self._issue([*self._probes(live), *missing][:limit])
            self._start()

    def dispatch_between_batches(self) -> None:
        """Dispatch after an event between batches; in deterministic mode only a batch does."""
        if not self.settings.deterministic:
            self.dispatch()

    def fail(self, error: BaseException) -> None:
        """End the run with an error. Only the first counts; running rollouts are cancelled."""
        if self.failure is None:
            self.failure = error
            self.cancel()
        self.broken.set()
        self.changed.set()

    def cancel(self) -> list["asyncio.Task[None]"]:
        """Cancel running rollouts; their groups stay in flight in the ledger."""
        return self.executor.cancel(self._groups.values())

    def finish(self) -> list["asyncio.Task[None]"]:
        """The run is complete: record live groups as unused. Returns the cancelled rollouts."""
        cancelled = self.cancel()
        with self.ledger.transaction():
            for ordinal in self._groups:
                self.ledger.end_group(ordinal, "filtered", UNUSED_REASON)
        self._groups.clear()
        return cancelled

    # -- issuing ---------------------------------------------------------------------------------

    def _issue(self, tasks: Sequence[str]) -> None:
        records, skipped = [], []
        for task in tasks:
            size, weights = self.tasks[task].settings.group_size, self._prompt_weights[task]
            while weights is not None and not weights.is_drawn(self._numbers[task]):
                skipped.append((task, self._numbers[task]))
                self._numbers[task] += 1
            record = GroupRecord(
                ordinal=self._ordinal,
                task=task,
                number=self._numbers[task],
                size=size,
                issued=self.current_update,
            )
            self._ordinal += 1
            self._numbers[task] += 1
            records.append(record)
            queued = list(reversed(range(size)))
            self._groups[record.ordinal] = GroupInFlight(record=record, queued=queued)
        if records:
            self.ledger.issue(records, skipped)

    def _probes(self, live_groups: Sequence[LiveGroup]) -> list[str]:
        """Disabled tasks that are due for a retry: one group each."""
        live, requested = (
            {group.task for group in live_groups},
            self.task_mixture.requested(self.next_update),
        )
        delay = self.settings.retry_disabled_after * self.settings.updates_per_batch
        return [
            task
            for task, row in self.task_mixture.disabled(self.next_update).items()
            if requested.get(task) and task not in live and self.next_update >= row.since + delay
        ]

    def _resume_group(self, record: GroupRecord) -> None:
        """A live group of an earlier process."""
        if record.task not in self.tasks:
            self.ledger.end_group(
                record.ordinal, "filtered", "its task is not in the recipe any more"
            )
            return
        try:
            done = self.ledger.rollouts(record.ordinal)
        except json_codec.RecordDecodeError as error:  # written by an older version
            self._discard(record, f"unreadable: {error}")
            return
        group = GroupInFlight(record=record, finished=record.status == "finished")
        for branches in done.values():
            group.note_version(oldest_version(branches))
        if not group.finished:
            group.done = done
            group.queued = [m for m in reversed(range(record.size)) if m not in done]
        self._groups[record.ordinal] = group
        if not group.finished and group.is_done:  # killed before its end was recorded
            self._end(group)

    def _discard(self, record: GroupRecord, why: str) -> None:
        """Drop a group of an earlier process that cannot be trained."""
        self.ledger.end_group(record.ordinal, "filtered", why)
        self._log_event("group_dropped", group=record.ordinal, task=record.task, why=why)

    # -- running ---------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start queued rollouts, those of started groups first: their tokens become stale."""
        if self.executor.is_full:
            return
        waiting = [group for group in self._groups.values() if group.queued]
        for group in waiting:
            if group.oldest_version is not None:
                self.executor.start(group, self.version)
        fresh = [group for group in waiting if group.oldest_version is None]
        if self.executor.is_full or not fresh:
            return
        left = groups_allowed(
            self.live_groups(), self.batch_context(), self.settings, started_only=True
        )
        for group in fresh:
            if self.executor.is_full or left <= 0:
                return
            self.executor.start(group, self.version)
            left -= group.oldest_version is not None

    def _ended(self, run: ActiveRollout, branches: tuple[Trajectory, ...]) -> None:
        group = run.group
        if self.failure is not None or group.record.ordinal not in self._groups:
            return
        group.note_version(oldest_version(branches))
        group.done[run.spec.member] = branches
        seconds = None
        if self.settings.ratio_unit == "seconds":
            seconds = asyncio.get_running_loop().time() - run.started
        self.ledger.record_rollout(group.record.ordinal, run.spec.member, branches, seconds)
        if group.is_done:
            self._end(group)
            self.dispatch()
            self.changed.set()
        else:
            self._start()

    # -- ending ----------------------------------------------------------------------------------

    def _end(self, group: GroupInFlight) -> None:
        """All rollouts of the group have ended: finished, filtered, failed or stale."""
        record = group.record
        rollouts: RolloutGroup = group.group
        group.done = {}  # stored in the ledger
        if rollouts.oldest_version is not None:
            # Until now the version at its start; its tokens may be of newer ones.
            group.oldest_version = rollouts.oldest_version
        self._record_rewards(record.task, record.number, group_rewards(rollouts.outcomes))
        reason = group_failure_reason(rollouts.outcomes)
        if not reason and is_stale(self.settings, group.oldest_version, self.next_update):
            self._drop(group)
            return
        status: Literal["failed", "filtered", "finished"] = "failed"
        if not reason:
            reason = self.tasks[record.task].group_filter(rollouts)
            status = "filtered" if reason else "finished"
        self.ledger.end_group(record.ordinal, status, reason)
        group.finished = status == "finished"
        if not group.finished:
            del self._groups[record.ordinal]
        self._update_task_health(record.task, status, reason)

    def _update_task_health(self, task: str, status: str, reason: str) -> None:
        """Disable a task after too many consecutive failed or filtered groups, or enable it."""
        why = self._health.record_group(task, status, reason)
        is_disabled = task in self.task_mixture.disabled(self.next_update)
        if status == "finished" and is_disabled:
            self.task_mixture.enable(task, since=self.next_update, now=self.current_update)
            self._log_event("task_enabled", task=task, update=self.next_update)
        elif why and self.tasks[task].settings.required:
            raise RunAbortedError(f"required task '{task}' failed: {why}")
        elif why:
            self.task_mixture.disable(task, why, since=self.next_update, now=self.current_update)
            if not is_disabled:
                self._log_event("task_disabled", task=task, why=why, update=self.next_update)

    def _drop(self, group: GroupInFlight) -> None:
        record = group.record
        staleness = (
            self.next_update + self.settings.updates_per_batch - 1 - (group.oldest_version or 0)
        )
        reason = f"{STALE}: {staleness} updates old, max_staleness is {self.settings.max_staleness}"
        self.ledger.end_group(record.ordinal, "filtered", reason)
        del self._groups[record.ordinal]
        self.executor.cancel_group(group)
        if (
            self.settings.on_stale == "wait"
        ):  # only an engine that serves old weights can cause this
            self._log_event("group_stale", group=record.ordinal, task=record.task, why=reason)
            self._update_task_health(record.task, "failed", reason)

    def _record_rewards(self, task: str, number: int, rewards: Sequence[float]) -> None:
        """Update the running pass rate of a prompt."""
        if (weights := self._prompt_weights.get(task)) is not None:
            weights.record(number, rewards)

    def _new_weights(self, task: str) -> PromptWeights | None:
        spec = self.tasks[task]
        if spec.settings.prompt_weights is None or spec.num_prompts is None:
            return None
        return PromptWeights(
            spec.settings.prompt_weights,
            num_prompts=spec.num_prompts,
            key=f"{self._seed}\0{task}",
        )

    def _new_health_monitor(self) -> TaskHealthMonitor:
        return TaskHealthMonitor({name: task.settings for name, task in self.tasks.items()})
