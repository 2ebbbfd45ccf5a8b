"""The attempts that run: as many as there are slots, each until it ends or its time is over."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from paddock.records import Trajectory
from paddock.rollout.deterministic import RequestBarrier
from paddock.rollout.group import TaskSpec
from paddock.rollout.in_flight import GroupInFlight, run_with_timeout
from paddock.rollout.task_schedule import RolloutSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRunningRollout:
    """An attempt that runs, and for how long already."""

    session_id: str
    task: str
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class ActiveRollout:
    """One attempt of a group."""

    group: GroupInFlight
    spec: RolloutSpec
    began: float


OnRolloutEnd = Callable[[ActiveRollout, tuple[Trajectory, ...]], None]


class RolloutExecutor:
    """Calls `ended` with every attempt that has ended, and `broken` with what one raised. In
    lock-step, `ended` is called when nobody moves, in an order that does not depend on when."""

    def __init__(
        self,
        works: Mapping[str, TaskSpec],
        *,
        seed: int,
        waves: RequestBarrier | None,
        ended: OnRolloutEnd,
        broken: Callable[[BaseException], None],
    ) -> None:
        self.limit = 0  # attempts at once
        self.ended_at = 0.0  # on the loop's clock: the last one
        self._works, self._seed, self._waves = works, seed, waves
        self._ended, self._broken = ended, broken
        self._runs: dict[str, ActiveRollout] = {}  # by session
        self._by_task: Counter[str] = Counter()
        self._late: list[
            tuple[ActiveRollout, tuple[Trajectory, ...]]
        ] = []  # ended since the last wave
        if waves is not None:
            waves.on_idle = self._everybody_is_still

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def is_full(self) -> bool:
        return len(self._runs) >= self.limit

    def longest_running(self, most: int = 3) -> list[LongRunningRollout]:
        """The attempts that have been running longest."""
        now = asyncio.get_running_loop().time()
        runs = sorted(self._runs.values(), key=lambda run: run.began)[:most]
        return [
            LongRunningRollout(
                session_id=r.spec.session_id, task=r.spec.task, seconds=now - r.began
            )
            for r in runs
        ]

    def start(self, flight: GroupInFlight, version: int) -> None:
        """As many of the group's attempts as there are slots for."""
        task = flight.record.task
        most = self._works[task].settings.max_concurrent or self.limit
        while flight.queued and not self.is_full and self._by_task[task] < most:
            member = flight.queued.pop()
            flight.note_version(version)
            given = RolloutSpec.derive(task, flight.record.number, member, seed=self._seed)
            run = ActiveRollout(flight, given, asyncio.get_running_loop().time())
            self._runs[given.session_id] = run
            self._by_task[task] += 1
            if self._waves is not None:
                self._waves.join(given.session_id)
            flight.running[member] = asyncio.ensure_future(self._run(run))

    def cancel_group(self, flight: GroupInFlight) -> None:
        """Cancel the group's attempts; their slots are free at once."""
        for task in flight.running.values():
            task.cancel()
        for run in [run for run in self._runs.values() if run.group is flight]:
            self.release(run)

    def cancel(self, flights: Iterable[GroupInFlight]) -> list["asyncio.Task[None]"]:
        tasks = [task for flight in flights for task in flight.running.values()]
        for task in tasks:
            task.cancel()
        return tasks

    def release(self, run: ActiveRollout) -> None:
        """Its slot; asked for twice where it was cancelled."""
        if self._runs.pop(run.spec.session_id, None) is None:
            return
        self._by_task[run.spec.task] -= 1
        run.group.running.pop(run.spec.member, None)
        if self._waves is not None:
            self._waves.leave(run.spec.session_id)

    async def _run(self, run: ActiveRollout) -> None:
        work = self._works[run.spec.task]
        try:
            branches = await run_with_timeout(
                work.rollout_fn, run.spec, limit_s=work.settings.attempt_timeout_s
            )
        except asyncio.CancelledError:
            self.release(run)
            raise
        except BaseException as error:  # a bug, here or in an attempt: the run ends with it
            self.release(run)
            self._broken(error)
            return
        self.ended_at = asyncio.get_running_loop().time()
        if self._waves is None:
            self._hand_over(run, branches)
        else:
            self._late.append((run, branches))
            self._waves.leave(run.spec.session_id)

    def _everybody_is_still(self) -> None:
        late, self._late = sorted(self._late, key=lambda item: item[0].spec.session_id), []
        for run, branches in late:
            self._hand_over(run, branches)

    def _hand_over(self, run: ActiveRollout, branches: tuple[Trajectory, ...]) -> None:
        self.release(run)
        try:
            self._ended(run, branches)
        except BaseException as error:
            self._broken(error)
