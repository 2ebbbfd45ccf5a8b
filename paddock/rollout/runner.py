"""The attempts that run: as many as there are slots, each until it ends or its time is over."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from paddock.records import Trajectory
from paddock.rollout.flight import Flight, made
from paddock.rollout.group import Work
from paddock.rollout.lockstep import Waves
from paddock.rollout.schedule import Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """An attempt that runs, and for how long already."""

    session_id: str
    task: str
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One attempt of a group."""

    flight: Flight
    given: Assignment
    began: float


Ended = Callable[[Run, tuple[Trajectory, ...]], None]


class Runner:
    """Calls `ended` with every attempt that has ended, and `broken` with what one raised. In
    lock-step, `ended` is called when nobody moves, in an order that does not depend on when."""

    def __init__(
        self,
        works: Mapping[str, Work],
        *,
        seed: int,
        waves: Waves | None,
        ended: Ended,
        broken: Callable[[BaseException], None],
    ) -> None:
        self.limit = 0  # attempts at once
        self.ended_at = 0.0  # on the loop's clock: the last one
        self._works, self._seed, self._waves = works, seed, waves
        self._ended, self._broken = ended, broken
        self._runs: dict[str, Run] = {}  # by session
        self._by_task: Counter[str] = Counter()
        self._late: list[tuple[Run, tuple[Trajectory, ...]]] = []  # ended since the last wave
        if waves is not None:
            waves.on_still = self._everybody_is_still

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def full(self) -> bool:
        return len(self._runs) >= self.limit

    def culprits(self, most: int = 3) -> list[Culprit]:
        """The attempts that have been running longest."""
        now = asyncio.get_running_loop().time()
        runs = sorted(self._runs.values(), key=lambda run: run.began)[:most]
        return [
            Culprit(session_id=r.given.session_id, task=r.given.task, seconds=now - r.began)
            for r in runs
        ]

    def start(self, flight: Flight, version: int) -> None:
        """As many of the group's attempts as there are slots for."""
        task = flight.entry.task
        most = self._works[task].settings.concurrency or self.limit
        while flight.queued and not self.full and self._by_task[task] < most:
            member = flight.queued.pop()
            flight.stamp(version)
            given = Assignment.of(task, flight.entry.number, member, seed=self._seed)
            run = Run(flight, given, asyncio.get_running_loop().time())
            self._runs[given.session_id] = run
            self._by_task[task] += 1
            if self._waves is not None:
                self._waves.let_in(given.session_id)
            flight.running[member] = asyncio.ensure_future(self._run(run))

    def stop(self, flight: Flight) -> None:
        """Cancel the group's attempts; their slots are free at once."""
        for task in flight.running.values():
            task.cancel()
        for run in [run for run in self._runs.values() if run.flight is flight]:
            self.free(run)

    def cancel(self, flights: Iterable[Flight]) -> list["asyncio.Task[None]"]:
        tasks = [task for flight in flights for task in flight.running.values()]
        for task in tasks:
            task.cancel()
        return tasks

    def free(self, run: Run) -> None:
        """Its slot; asked for twice where it was cancelled."""
        if self._runs.pop(run.given.session_id, None) is None:
            return
        self._by_task[run.given.task] -= 1
        run.flight.running.pop(run.given.member, None)
        if self._waves is not None:
            self._waves.leave(run.given.session_id)

    async def _run(self, run: Run) -> None:
        work = self._works[run.given.task]
        try:
            branches = await made(work.attempt, run.given, limit_s=work.settings.attempt_s)
        except asyncio.CancelledError:
            self.free(run)
            raise
        except BaseException as error:  # a bug, here or in an attempt: the run ends with it
            self.free(run)
            self._broken(error)
            return
        self.ended_at = asyncio.get_running_loop().time()
        if self._waves is None:
            self._hand_over(run, branches)
        else:
            self._late.append((run, branches))
            self._waves.leave(run.given.session_id)

    def _everybody_is_still(self) -> None:
        late, self._late = sorted(self._late, key=lambda item: item[0].given.session_id), []
        for run, branches in late:
            self._hand_over(run, branches)

    def _hand_over(self, run: Run, branches: tuple[Trajectory, ...]) -> None:
        self.free(run)
        try:
            self._ended(run, branches)
        except BaseException as error:
            self._broken(error)
