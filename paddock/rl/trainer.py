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

from paddock.checkpoint import WeightPublisher
from paddock.rl.alerts import Alert, HealthSignals, check_alerts
from paddock.rl.batch_source import BatchSource
from paddock.rl.credit import assign_credit
from paddock.rl.distill import LogprobScorer, TaskTeacher, add_teacher_logprobs
from paddock.rl.group_filter import GroupFilter, RolloutStats
from paddock.rl.learner import Learner, TrainStats
from paddock.rl.settings import RLSettings
from paddock.rollout import RolloutGroup
from paddock.train import policy


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateMetrics:
    """What a watcher is told after each batch."""

    update: int  # done so far
    steps: int
    train_stats: TrainStats
    rollout_stats: RolloutStats
    staleness: tuple[int, ...]  # of the batch's groups, in updates
    seconds: float  # since the last moment
    data_wait_s: float  # of them, the trainer for its batch
    weight_sync_s: float  # of them, for engines to take the weights before
    engine_busy: float | None  # of them, the engines at work; None where nobody knows
    alerts: tuple[Alert, ...]

    @property
    def trainer_idle(self) -> float:
        return min(1.0, self.data_wait_s / max(self.seconds, 1e-9))

    @property
    def engine_idle(self) -> float | None:
        """A step counts as work when it is over, so that there may seem to be more than time."""
        return None if self.engine_busy is None else max(0.0, 1 - self.engine_busy)

    def metrics(self) -> dict[str, float]:
        """For the journal."""
        parts = dict.fromkeys(
            name for report in self.train_stats.step_outputs for name in report.losses
        )
        numbers = {name: self.train_stats.mean(name) for name in parts}
        if self.rollout_stats.reward is not None:
            numbers["reward"] = self.rollout_stats.reward
        numbers |= {f"reward_{task}": reward for task, reward in self.rollout_stats.rewards.items()}
        numbers |= {f"failed_{kind}": count for kind, count in self.rollout_stats.failures.items()}
        if self.engine_idle is not None:
            numbers["engine_idle"] = self.engine_idle
        for last in self.train_stats.step_outputs[-1:]:
            numbers |= {"grad_norm": last.grad_norm, "lr": last.lr}
        return numbers | {
            "staleness": sum(self.staleness) / max(1, len(self.staleness)),
            "staleness_max": max(self.staleness, default=0),
            "trainer_idle": self.trainer_idle,
            "flat": self.rollout_stats.num_zero_variance / max(1, self.rollout_stats.num_groups),
            "truncated": self.rollout_stats.num_truncated / max(1, self.rollout_stats.num_rollouts),
            "tokens": self.train_stats.tokens,
            "seconds": self.seconds,
            "pushed_s": self.weight_sync_s,
        }


def policy_samples(group: RolloutGroup, settings: RLSettings) -> list[policy.PolicySample]:
    """What a group's own rewards have to teach."""
    judgement = assign_credit(group.rollouts, group.size, settings.credit_for(group.task))
    temperature = settings.sampling_for(group.task).temperature
    return [
        policy.PolicySample(sample=sample, weight=0.0, temperature=temperature)
        for sample in judgement.samples
    ]


def task_teachers(settings: RLSettings) -> dict[str, TaskTeacher]:
    """Which tasks have a teacher."""
    return {
        name: TaskTeacher(task.teacher, task.teacher_weight)
        for name, task in settings.tasks.items()
        if task.teacher is not None
    }


def health_signals(study: TrainStats, tally: RolloutStats, lags: Sequence[int]) -> HealthSignals:
    return HealthSignals(
        entropy=study.mean("entropy"),
        logprob_diff=study.mean("logprob_diff"),
        masked=study.mean("masked"),
        num_groups=tally.num_groups,
        num_zero_variance=tally.num_zero_variance,
        staleness=max(lags, default=0) + len(study.step_outputs) - 1,
    )


def target_reached(recent: Sequence[float], settings: RLSettings) -> bool:
    """Whether the last batches did well enough on average."""
    if settings.stop_at_reward is None or len(recent) < settings.stop_window:
        return False
    return sum(recent) / len(recent) >= settings.stop_at_reward


def crosses_multiple(updates: int, done: int, every: int) -> bool:
    """Whether the last `done` updates passed a multiple of `every`.

    >>> [n for n in range(2, 13, 2) if crosses_multiple(n, 2, 4)]
    [4, 8, 12]
    """
    return updates // every > (updates - done) // every


@dataclass(kw_only=True)
class RLTrainer:
    """What the loop works with."""

    batches: BatchSource
    learner: Learner
    publish_weights: WeightPublisher  # blocks until engines answer with the new weights
    checkpoints: Path
    group_filter: GroupFilter
    teachers: Mapping[str, LogprobScorer] = field(default_factory=dict)  # teachers
    extra_files: Mapping[str, bytes] = field(default_factory=dict)  # files of the model folder
    on_update: Callable[[UpdateMetrics], None] = lambda _: None
    engine_busy_s: Callable[[], float] | None = None  # how long engines have worked, in all
    add_routing: Callable[[Sequence[policy.PolicySample]], list[policy.PolicySample]] = (
        list  # what engines routed, where kept
    )
    clock: Callable[[], float] = time.monotonic

    async def run(self) -> None:
        """Until the queue is empty or the goal is reached."""
        gc.collect()
        gc.freeze()  # or all that was loaded is looked through, again and again, by either thread
        try:
            await self._run()
            self.batches.finish()
        finally:
            gc.unfreeze()

    async def _run(self) -> None:
        settings, learner = self.learner.settings, self.learner
        recent: deque[float] = deque(maxlen=settings.stop_window)
        recent.extend(learner.extra_state.get("rewards", ()))
        if "tally" in learner.extra_state:
            self.group_filter.load_state_dict(learner.extra_state["tally"])
        if target_reached(recent, settings):  # by an earlier call
            return
        began, busy, pushed_s = self.clock(), await self._busy(), 0.0
        while (batch := await self.batches.next_batch()) is not None:
            tally = self.group_filter.pop_stats()
            groups = await self._lessons(batch.groups)
            study = await self.batches.await_or_fail(asyncio.to_thread(learner.train, groups))
            self.batches.mark_trained(batch)
            if tally.reward is not None:
                recent.append(tally.reward)
            over = study.updates >= settings.steps or target_reached(recent, settings)
            now, busy_now = self.clock(), await self._busy()
            self.on_update(
                UpdateMetrics(
                    update=study.updates,
                    steps=settings.steps,
                    train_stats=study,
                    rollout_stats=tally,
                    staleness=batch.staleness,
                    seconds=now - began,
                    data_wait_s=batch.wait_s,
                    weight_sync_s=pushed_s,
                    engine_busy=(busy_now - busy) / max(now - began, 1e-9)
                    if self.engine_busy_s
                    else None,
                    alerts=tuple(
                        check_alerts(health_signals(study, tally, batch.staleness), settings.alerts)
                    ),
                )
            )
            began, busy = now, busy_now
            # Told before it is saved: whoever is killed in between tells it again.
            pushed_s = await self._hand_over(over, recent)
            if over:
                return

    async def _busy(self) -> float:
        """Off the event loop: an engine answers between two steps."""
        return (
            await self.batches.await_or_fail(asyncio.to_thread(self.engine_busy_s))
            if self.engine_busy_s
            else 0.0
        )

    async def _lessons(self, groups: Sequence[RolloutGroup]) -> list[list[policy.PolicySample]]:
        """What there is to learn from each group, teachers asked."""
        settings = self.learner.settings
        found = [policy_samples(group, settings) for group in groups]
        flat = self.add_routing([lesson for lessons in found for lesson in lessons])
        tasks = [g.task for g, lessons in zip(groups, found, strict=True) for _ in lessons]
        every = iter(
            await add_teacher_logprobs(flat, tasks, task_teachers(settings), self.teachers)
        )
        return [[next(every) for _ in lessons] for lessons in found if lessons]

    async def _hand_over(self, over: bool, recent: deque[float]) -> float:
        """Every so many updates: engines get the weights, the optimizer begins anew if asked, and
        now and then it all goes to disk. Returns how long engines took."""
        learner, settings = self.learner, self.learner.settings
        pace = settings.rollout
        if not over and not crosses_multiple(
            learner.updates, pace.updates_per_batch, pace.sync_weights_every
        ):
            return 0.0
        # Where work in flight must not see other weights, this waits for it; what was written with
        # the old ones is then in the ledger, and the checkpoint needs them no more.
        await self.batches.wait_quiescent()
        if settings.reset_optimizer:
            learner.reset_optimizer()
        if over or crosses_multiple(
            learner.updates, pace.updates_per_batch, settings.checkpoint.every
        ):
            learner.extra_state = {"rewards": list(recent), "tally": self.group_filter.state_dict()}
            saved = await asyncio.to_thread(
                learner.save, self.checkpoints, beside=dict(self.extra_files), over=over
            )
            self.batches.mark_checkpointed(learner.updates, saved.name)
        began = self.clock()
        # An engine that stands still would keep a run that has failed already.
        await self.batches.await_or_fail(asyncio.to_thread(self.publish_weights, learner.weights()))
        self.batches.mark_published(learner.updates)
        return self.clock() - began
