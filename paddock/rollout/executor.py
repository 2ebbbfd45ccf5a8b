"""Rollout executor: runs rollouts up to a concurrency limit, each with a timeout."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from paddock.records import Trajectory
from paddock.rollout.deterministic import RequestBarrier
from paddock.rollout.group import TaskSpec
from paddock.rollout.in_flight import GroupInFlight, run_with_timeout
from paddock.rollout.task_schedule import RolloutSpec

STRAGGLER_RATIO = 3.0  # of its age to the median duration
DURATIONS = 256  # rollouts whose median is compared with


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRunningRollout:
    """A running rollout and its age."""

    session_id: str
    task: str
    seconds: float
    median_s: float | None = None  # of rollouts of the task that ended


@dataclass(frozen=True, slots=True, eq=False)
class ActiveRollout:
    """A running rollout of a group."""

    group: GroupInFlight
    spec: RolloutSpec
    started: float


OnRolloutEnd = Callable[[ActiveRollout, tuple[Trajectory, ...]], None]


class RolloutExecutor:
    """Calls `on_end` with every finished rollout and `on_error` with an exception of one.

    In deterministic mode `on_end` is called at barriers only, in the order of session ids.
    """

    def __init__(
        self,
        tasks: Mapping[str, TaskSpec],
        *,
        seed: int,
        barrier: RequestBarrier | None,
        on_end: OnRolloutEnd,
        on_error: Callable[[BaseException], None],
    ) -> None:
        self.limit = 0  # maximum number of running rollouts
        self.ended_at = 0.0  # event-loop time of the last end of a rollout
        self._tasks, self._seed, self._barrier = tasks, seed, barrier
        self._on_end, self._on_error = on_end, on_error
        self._runs: dict[str, ActiveRollout] = {}  # by session
        self._by_task: Counter[str] = Counter()
        self._durations: dict[str, deque[float]] = {}  # of the newest rollouts of each task
        # Ended since the last barrier.
        self._ended: list[tuple[ActiveRollout, tuple[Trajectory, ...]]] = []
        if barrier is not None:
            barrier.on_idle = self._report_ended

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def is_full(self) -> bool:
        return len(self._runs) >= self.limit

    def running(self, task: str) -> int:
        """Number of running rollouts of a task."""
        return self._by_task[task]

    def stragglers(self, limit: int = 20) -> list[LongRunningRollout]:
        """Rollouts that run much longer than the median of their task, the longest first."""
        return [
            run
            for run in self.longest_running(len(self))
            if run.median_s is not None and run.seconds > STRAGGLER_RATIO * run.median_s
        ][:limit]

    def longest_running(self, limit: int = 3) -> list[LongRunningRollout]:
        """The longest-running rollouts."""
        now = asyncio.get_running_loop().time()
        runs = sorted(self._runs.values(), key=lambda run: run.started)[:limit]
        return [
            LongRunningRollout(
                session_id=r.spec.session_id,
                task=r.spec.task,
                seconds=now - r.started,
                median_s=self._median_s(r.spec.task),
            )
            for r in runs
        ]

    def _median_s(self, task: str) -> float | None:
        return median(found) if (found := self._durations.get(task)) else None

    def start(self, group: GroupInFlight, version: int) -> None:
        """Start queued rollouts of the group, within the limits of run and task."""
        task = group.record.task
        limit = self._tasks[task].settings.max_concurrent or self.limit
        while group.queued and not self.is_full and self._by_task[task] < limit:
            member = group.queued.pop()
            group.note_version(version)
            spec = RolloutSpec.derive(task, group.record.number, member, seed=self._seed)
            run = ActiveRollout(group, spec, asyncio.get_running_loop().time())
            self._runs[spec.session_id] = run
            self._by_task[task] += 1
            if self._barrier is not None:
                self._barrier.join(spec.session_id)
            group.running[member] = asyncio.ensure_future(self._run(run))

    def cancel_group(self, group: GroupInFlight) -> None:
        """Cancel the rollouts of a group; their slots are free at once."""
        for task in group.running.values():
            task.cancel()
        for run in [run for run in self._runs.values() if run.group is group]:
            self.release(run)

    def cancel(self, groups: Iterable[GroupInFlight]) -> list["asyncio.Task[None]"]:
        tasks = [task for group in groups for task in group.running.values()]
        for task in tasks:
            task.cancel()
        return tasks

    def release(self, run: ActiveRollout) -> None:
        """Free the slot of a rollout; idempotent, since a cancelled rollout is released twice."""
        if self._runs.pop(run.spec.session_id, None) is None:
            return
        self._by_task[run.spec.task] -= 1
        run.group.running.pop(run.spec.member, None)
        if self._barrier is not None:
            self._barrier.leave(run.spec.session_id)

    async def _run(self, run: ActiveRollout) -> None:
        task = self._tasks[run.spec.task]
        try:
            branches = await run_with_timeout(
                task.rollout_fn, run.spec, timeout_s=task.settings.attempt_timeout_s
            )
        except asyncio.CancelledError:
            self.release(run)
            raise
        except BaseException as error:  # a bug: it ends the run
            self.release(run)
            self._on_error(error)
            return
        self.ended_at = asyncio.get_running_loop().time()
        durations = self._durations.setdefault(run.spec.task, deque(maxlen=DURATIONS))
        durations.append(self.ended_at - run.started)
        if self._barrier is None:
            self._report(run, branches)
        else:
            self._ended.append((run, branches))
            self._barrier.leave(run.spec.session_id)

    def _report_ended(self) -> None:
        ended, self._ended = sorted(self._ended, key=lambda item: item[0].spec.session_id), []
        for run, branches in ended:
            self._report(run, branches)

    def _report(self, run: ActiveRollout, branches: tuple[Trajectory, ...]) -> None:
        self.release(run)
        try:
            self._on_end(run, branches)
        except BaseException as error:
            self._on_error(error)
