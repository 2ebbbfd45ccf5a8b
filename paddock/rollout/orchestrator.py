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
from paddock.records import RecordDecodeError, Trajectory
from paddock.rollout.flight import Flight
from paddock.rollout.group import Group, Work, oldest_version, why_failed
from paddock.rollout.health import STALE, Health, RunAborted
from paddock.rollout.lockstep import Waves
from paddock.rollout.mix import Mix
from paddock.rollout.quota import (
    Alive,
    Missing,
    Moment,
    Ready,
    compose,
    is_stale,
    room,
    wanted,
)
from paddock.rollout.runner import Run, Runner
from paddock.rollout.settings import Pace

Tell = Callable[..., None]  # kind, and what there is to say about it


class Orchestrator:
    """Used by one thread, that of the loop it runs in. `tell` hears what a person may want to know;
    `waves` keep lock-step."""

    def __init__(
        self,
        works: Mapping[str, Work],
        pace: Pace,
        ledger: Ledger,
        *,
        seed: int,
        tell: Tell = lambda *_, **__: None,
        waves: Waves | None = None,
    ) -> None:
        if not works:
            raise RunAborted("there is no task to run")
        if pace.lockstep != (waves is not None):
            raise ValueError("lock-step is kept by waves: give both or neither")
        self.works, self.pace, self.ledger = dict(works), pace, ledger
        self.mix = Mix(ledger, {task: work.settings.ratio for task, work in works.items()})
        self.runner = Runner(
            self.works, seed=seed, waves=waves, ended=self._ended, broken=self.fail
        )
        self.runner.limit = pace.concurrency
        self.update = 0  # the first of the next batch that will be made
        self.now = 0  # the first of the batch that is being made or trained
        self.version = 0  # what engines serve
        self.ahead = 0  # how many batches may be alive
        self.changed = asyncio.Event()
        self.broken = asyncio.Event()
        self.failure: BaseException | None = None  # what broke it
        self._seed, self._tell = seed, tell
        self._flights: dict[int, Flight] = {}  # every group that is alive, in the order of issue
        self._numbers: Counter[str] = Counter()  # the next number of each task
        self._ordinal = 0
        self._taken: Counter[str] = Counter()  # in batches, since the present shares hold
        self._taken_since = 0
        self._health = self._fresh_health()

    # -- where things stand ----------------------------------------------------------------------

    def alive(self) -> list[Alive]:
        return [flight.alive for flight in self._flights.values()]

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight."""
        return not len(self.runner) and all(flight.finished for flight in self._flights.values())

    def queued(self) -> int:
        return sum(len(flight.queued) for flight in self._flights.values())

    def moment(self) -> Moment:
        weights, since = self.mix.weights(self.update), self.mix.since(self.update)
        if since != self._taken_since:
            self._taken, self._taken_since = Counter(), since
        return Moment(
            update=self.update, version=self.version, weights=weights, taken=dict(self._taken)
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
        self.update = self.now = self.version = updates
        self.mix.resume(updates)
        self._taken_since = self.mix.since(updates)
        entries = self.ledger.groups()
        self._ordinal = 1 + max((entry.ordinal for entry in entries), default=-1)
        self._numbers = Counter()
        self._taken = Counter(
            e.task for e in entries if e.trained is not None and e.trained >= self._taken_since
        )
        self._health = self._fresh_health()
        self._health.recall(entry for entry in entries if entry.status != "in flight")
        for entry in entries:
            self._numbers[entry.task] = max(self._numbers[entry.task], entry.number + 1)
            if entry.status in ("in flight", "finished"):
                self._take_up(entry)

    def take(self, ready: Ready) -> list[GroupRecord]:
        """A batch leaves for the trainer."""
        gone = [self._flights.pop(ordinal).entry for ordinal in ready.ordinals]
        self._taken.update(entry.task for entry in gone)
        return gone

    def set_ratios(self, ratios: Mapping[str, float]) -> None:
        """From the next batch on that is made."""
        self.mix.ask(ratios, since=self.update, now=self.now)
        self._tell("ratios", ratios=dict(ratios), update=self.update)
        self.pump_between()
        self.changed.set()

    def compose(self) -> Ready | Missing:
        """The next batch, if it is there; what is too old for it is thrown away first."""
        stale = [f for f in self._flights.values() if is_stale(self.pace, f.since, self.update)]
        for flight in stale:
            self._drop(flight)
        if stale:
            self.pump()
        return compose(self.alive(), self.moment(), self.pace)

    def pump(self) -> None:
        """Issue what the next batches lack, and start what may start."""
        if self.failure is None:
            moment, alive = self.moment(), self.alive()
            lacking = wanted(alive, moment, self.pace, ahead=self.ahead)
            most = max(0, room(alive, moment, self.pace, begun=False))
            self._issue([*self._probes(alive), *lacking][:most])
            self._start()

    def pump_between(self) -> None:
        """After what happens between two batches. In lock-step, the next batch begins all."""
        if not self.pace.lockstep:
            self.pump()

    def fail(self, error: BaseException) -> None:
        """The run cannot go on. The first reason counts; everything that runs is cancelled."""
        if self.failure is None:
            self.failure = error
            self.cancel()
        self.broken.set()
        self.changed.set()

    def cancel(self) -> list["asyncio.Task[None]"]:
        """Everything that runs; the ledger knows it as in flight."""
        return self.runner.cancel(self._flights.values())

    def complete(self) -> list["asyncio.Task[None]"]:
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
            size = self.works[task].settings.group_size
            entry = GroupRecord(
                ordinal=self._ordinal,
                task=task,
                number=self._numbers[task],
                size=size,
                issued=self.now,
            )
            self._ordinal += 1
            self._numbers[task] += 1
            entries.append(entry)
            queued = list(reversed(range(size)))
            self._flights[entry.ordinal] = Flight(entry=entry, queued=queued)
        if entries:
            self.ledger.issue(entries)

    def _probes(self, alive: Sequence[Alive]) -> list[str]:
        """Tasks that were set aside and have rested: one group of each, to see."""
        there, asked = {group.task for group in alive}, self.mix.asked(self.update)
        rest = self.pace.rest_batches * self.pace.updates_per_batch
        return [
            task
            for task, row in self.mix.aside(self.update).items()
            if asked.get(task) and task not in there and self.update >= row.since + rest
        ]

    def _take_up(self, entry: GroupRecord) -> None:
        """A group of the past that is alive."""
        if entry.task not in self.works:
            self.ledger.end_group(
                entry.ordinal, "filtered", "its task is not in the recipe any more"
            )
            return
        try:
            done = self.ledger.rollouts(entry.ordinal)
        except RecordDecodeError as error:  # a record that no rollout could write any more
            self._discard(entry, f"unreadable: {error}")
            return
        flight = Flight(entry=entry, finished=entry.status == "finished")
        for branches in done.values():
            flight.stamp(oldest_version(branches))
        if not flight.finished:
            flight.done = done
            flight.queued = [m for m in reversed(range(entry.size)) if m not in done]
        self._flights[entry.ordinal] = flight
        if not flight.finished and flight.ended:  # killed before its end was written
            self._end(flight)

    def _discard(self, entry: GroupRecord, why: str) -> None:
        """A group of the past that cannot be trained: the run goes on without it."""
        self.ledger.end_group(entry.ordinal, "filtered", why)
        self._tell("group_dropped", group=entry.ordinal, task=entry.task, why=why)

    # -- running ---------------------------------------------------------------------------------

    def _start(self) -> None:
        """Attempts of groups that have begun come first: their tokens grow old."""
        if self.runner.full:
            return
        waiting = [flight for flight in self._flights.values() if flight.queued]
        for flight in waiting:
            if flight.since is not None:
                self.runner.start(flight, self.version)
        fresh = [flight for flight in waiting if flight.since is None]
        if self.runner.full or not fresh:
            return
        left = room(self.alive(), self.moment(), self.pace, begun=True)
        for flight in fresh:
            if self.runner.full or left <= 0:
                return
            self.runner.start(flight, self.version)
            left -= flight.since is not None

    def _ended(self, run: Run, branches: tuple[Trajectory, ...]) -> None:
        flight = run.flight
        if self.failure is not None or flight.entry.ordinal not in self._flights:
            return
        flight.stamp(oldest_version(branches))
        flight.done[run.given.member] = branches
        self.ledger.record_rollout(flight.entry.ordinal, run.given.member, branches)
        if flight.ended:
            self._end(flight)
            self.pump()
            self.changed.set()
        else:
            self._start()

    # -- ending ----------------------------------------------------------------------------------

    def _end(self, flight: Flight) -> None:
        """Every attempt of the group has ended: what is it good for?"""
        entry = flight.entry
        group: Group = flight.group
        flight.done = {}  # the ledger has them; memory is for what runs
        if group.oldest_version is not None:
            flight.since = group.oldest_version  # so far, when it began: its tokens may be younger
        reason = why_failed(group.outcomes)
        if not reason and is_stale(self.pace, flight.since, self.update):
            self._drop(flight)
            return
        status: Literal["failed", "filtered", "finished"] = "failed"
        if not reason:
            reason = self.works[entry.task].sift(group)
            status = "filtered" if reason else "finished"
        self.ledger.end_group(entry.ordinal, status, reason)
        flight.finished = status == "finished"
        if not flight.finished:
            del self._flights[entry.ordinal]
        self._judge(entry.task, status, reason)

    def _judge(self, task: str, status: str, reason: str) -> None:
        why = self._health.ended(task, status, reason)
        is_aside = task in self.mix.aside(self.update)
        if status == "finished" and is_aside:
            self.mix.bring_back(task, since=self.update, now=self.now)
            self._tell("task_back", task=task, update=self.update)
        elif why and self.works[task].settings.essential:
            raise RunAborted(f"task '{task}' cannot be done without: {why}")
        elif why:
            self.mix.set_aside(task, why, since=self.update, now=self.now)
            if not is_aside:
                self._tell("task_aside", task=task, why=why, update=self.update)

    def _drop(self, flight: Flight) -> None:
        entry = flight.entry
        lag = self.update + self.pace.updates_per_batch - 1 - (flight.since or 0)
        reason = f"{STALE}: {lag} updates old, at most {self.pace.max_staleness} are allowed"
        self.ledger.end_group(entry.ordinal, "filtered", reason)
        del self._flights[entry.ordinal]
        self.runner.stop(flight)
        if self.pace.bound_by == "wait":  # only an engine that serves old weights can do this
            self._tell("stale", group=entry.ordinal, task=entry.task, why=reason)
            self._judge(entry.task, "failed", reason)

    def _fresh_health(self) -> Health:
        return Health({task: work.settings for task, work in self.works.items()})
