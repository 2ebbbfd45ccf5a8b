"""The one loop: take a batch, learn from it, hand the weights over.

Synchronous, one-step-off and fully asynchronous are settings of the queue it takes from.
"""

import asyncio
import gc
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paddock.checkpoint.weight_sync import WeightPublisher
from paddock.rl.alerts import Alert, Pulse, alerts
from paddock.rl.credit import judge
from paddock.rl.distill import Score, Teaching, taught
from paddock.rl.learner import Learner, Study
from paddock.rl.queue import Queue
from paddock.rl.settings import RLSettings
from paddock.rl.tally import Sifter, Tally
from paddock.rollout.group import RolloutGroup
from paddock.train.policy import PolicySample


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a watcher is told after each batch."""

    update: int  # done so far
    steps: int
    study: Study
    tally: Tally
    lags: tuple[int, ...]  # of the batch's groups, in updates
    seconds: float  # since the last moment
    waited_s: float  # of them, the trainer for its batch
    pushed_s: float  # of them, for engines to take the weights before
    busy_share: float | None  # of them, the engines at work; None where nobody knows
    alerts: tuple[Alert, ...]

    @property
    def idle_share(self) -> float:
        return min(1.0, self.waited_s / max(self.seconds, 1e-9))

    @property
    def engine_idle(self) -> float | None:
        """A step counts as work when it is over, so that there may seem to be more than time."""
        return None if self.busy_share is None else max(0.0, 1 - self.busy_share)

    def numbers(self) -> dict[str, float]:
        """For the journal."""
        parts = dict.fromkeys(name for report in self.study.reports for name in report.losses)
        numbers = {name: self.study.mean(name) for name in parts}
        if self.tally.reward is not None:
            numbers["reward"] = self.tally.reward
        numbers |= {f"reward_{task}": reward for task, reward in self.tally.rewards.items()}
        numbers |= {f"failed_{kind}": count for kind, count in self.tally.failures.items()}
        if self.engine_idle is not None:
            numbers["engine_idle"] = self.engine_idle
        for last in self.study.reports[-1:]:
            numbers |= {"grad_norm": last.grad_norm, "lr": last.lr}
        return numbers | {
            "staleness": sum(self.lags) / max(1, len(self.lags)),
            "staleness_max": max(self.lags, default=0),
            "trainer_idle": self.idle_share,
            "flat": self.tally.flat / max(1, self.tally.judged),
            "truncated": self.tally.truncated / max(1, self.tally.attempts),
            "tokens": self.study.tokens,
            "seconds": self.seconds,
            "pushed_s": self.pushed_s,
        }


def lessons_of(group: RolloutGroup, settings: RLSettings) -> list[PolicySample]:
    """What a group's own rewards have to teach."""
    judgement = judge(group.rollouts, group.size, settings.credit_of(group.task))
    temperature = settings.sampling_of(group.task).temperature
    return [
        PolicySample(sample=sample, weight=0.0, temperature=temperature)
        for sample in judgement.samples
    ]


def teachings(settings: RLSettings) -> dict[str, Teaching]:
    """Which tasks have a teacher."""
    return {
        name: Teaching(task.teacher, task.teaching)
        for name, task in settings.tasks.items()
        if task.teacher is not None
    }


def pulse(study: Study, tally: Tally, lags: Sequence[int]) -> Pulse:
    return Pulse(
        entropy=study.mean("entropy"),
        gap=study.mean("gap"),
        masked=study.mean("masked"),
        judged=tally.judged,
        flat=tally.flat,
        lag=max(lags, default=0) + len(study.reports) - 1,
    )


def reached(recent: Sequence[float], settings: RLSettings) -> bool:
    """Whether the last batches did well enough on average."""
    if settings.goal is None or len(recent) < settings.goal_batches:
        return False
    return sum(recent) / len(recent) >= settings.goal


def crossed(updates: int, done: int, every: int) -> bool:
    """Whether the last `done` updates passed a multiple of `every`.

    >>> [n for n in range(2, 13, 2) if crossed(n, 2, 4)]
    [4, 8, 12]
    """
    return updates // every > (updates - done) // every


@dataclass(kw_only=True)
class Loop:
    """What the loop works with."""

    queue: Queue
    learner: Learner
    publish: WeightPublisher  # blocks until engines answer with the new weights
    checkpoints: Path
    sifter: Sifter
    scores: Mapping[str, Score] = field(default_factory=dict)  # teachers
    beside: Mapping[str, bytes] = field(default_factory=dict)  # files of the model folder
    watch: Callable[[Moment], None] = lambda _: None
    busy_s: Callable[[], float] | None = None  # how long engines have worked, in all
    experts: Callable[[Sequence[PolicySample]], list[PolicySample]] = (
        list  # what engines routed, where kept
    )
    clock: Callable[[], float] = time.monotonic

    async def run(self) -> None:
        """Until the queue is empty or the goal is reached."""
        gc.collect()
        gc.freeze()  # or all that was loaded is looked through, again and again, by either thread
        try:
            await self._run()
            self.queue.complete()
        finally:
            gc.unfreeze()

    async def _run(self) -> None:
        settings, learner = self.learner.settings, self.learner
        recent: deque[float] = deque(maxlen=settings.goal_batches)
        recent.extend(learner.facts.get("rewards", ()))
        if "tally" in learner.facts:
            self.sifter.restore(learner.facts["tally"])
        if reached(recent, settings):  # by an earlier call
            return
        began, busy, pushed_s = self.clock(), await self._busy(), 0.0
        while (batch := await self.queue.next_batch()) is not None:
            tally = self.sifter.take()
            groups = await self._lessons(batch.groups)
            study = await self.queue.watch(asyncio.to_thread(learner.study, groups))
            self.queue.trained(batch)
            if tally.reward is not None:
                recent.append(tally.reward)
            over = study.updates >= settings.steps or reached(recent, settings)
            now, busy_now = self.clock(), await self._busy()
            self.watch(
                Moment(
                    update=study.updates,
                    steps=settings.steps,
                    study=study,
                    tally=tally,
                    lags=batch.lags,
                    seconds=now - began,
                    waited_s=batch.waited_s,
                    pushed_s=pushed_s,
                    busy_share=(busy_now - busy) / max(now - began, 1e-9) if self.busy_s else None,
                    alerts=tuple(alerts(pulse(study, tally, batch.lags), settings.alerts)),
                )
            )
            began, busy = now, busy_now
            # Told before it is saved: whoever is killed in between tells it again.
            pushed_s = await self._hand_over(over, recent)
            if over:
                return

    async def _busy(self) -> float:
        """Off the event loop: an engine answers between two steps."""
        return await self.queue.watch(asyncio.to_thread(self.busy_s)) if self.busy_s else 0.0

    async def _lessons(self, groups: Sequence[RolloutGroup]) -> list[list[PolicySample]]:
        """What there is to learn from each group, teachers asked."""
        settings = self.learner.settings
        found = [lessons_of(group, settings) for group in groups]
        flat = self.experts([lesson for lessons in found for lesson in lessons])
        tasks = [g.task for g, lessons in zip(groups, found, strict=True) for _ in lessons]
        every = iter(await taught(flat, tasks, teachings(settings), self.scores))
        return [[next(every) for _ in lessons] for lessons in found if lessons]

    async def _hand_over(self, over: bool, recent: deque[float]) -> float:
        """Every so many updates: engines get the weights, the optimizer begins anew if asked, and
        now and then it all goes to disk. Returns how long engines took."""
        learner, settings = self.learner, self.learner.settings
        pace = settings.pace
        if not over and not crossed(
            learner.updates, pace.updates_per_batch, pace.sync_weights_every
        ):
            return 0.0
        # Where work in flight must not see other weights, this waits for it; what was written with
        # the old ones is then in the ledger, and the checkpoint needs them no more.
        await self.queue.border()
        if settings.reset_optimizer:
            learner.forget_momentum()
        if over or crossed(learner.updates, pace.updates_per_batch, settings.keep.every):
            learner.facts = {"rewards": list(recent), "tally": self.sifter.state()}
            saved = await asyncio.to_thread(
                learner.save, self.checkpoints, beside=dict(self.beside), over=over
            )
            self.queue.checkpointed(learner.updates, saved.name)
        began = self.clock()
        # An engine that stands still would keep a run that has failed already.
        await self.queue.watch(asyncio.to_thread(self.publish, learner.parcels()))
        self.queue.pushed(learner.updates)
        return self.clock() - began
