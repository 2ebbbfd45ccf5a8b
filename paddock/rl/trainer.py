"""RL training loop: next batch, train, weight sync, checkpoint.

Synchronous, one-step-off and fully asynchronous RL differ only in the batch source.
"""

import asyncio
import gc
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """Metrics of one batch, passed to `on_update`."""

    update: int  # updates done so far
    steps: int
    train_stats: TrainStats
    rollout_stats: RolloutStats
    staleness: tuple[int, ...]  # of each group of the batch, in updates
    task_tokens: Mapping[str, int]  # sampled, in the groups of the batch
    seconds: float  # since the last UpdateMetrics
    data_wait_s: float  # of `seconds`, waiting for the batch
    weight_sync_s: float  # of `seconds`, the weight sync before this batch
    engine_busy: float | None  # fraction of `seconds`; None if unknown
    accept_length: float | None  # before the first update and after that of a checkpoint
    alerts: tuple[Alert, ...]

    @property
    def trainer_idle(self) -> float:
        return min(1.0, self.data_wait_s / max(self.seconds, 1e-9))

    @property
    def engine_idle(self) -> float | None:
        """Engines count a step when it ends, so `engine_busy` can exceed 1."""
        return None if self.engine_busy is None else max(0.0, 1 - self.engine_busy)

    def metrics(self) -> dict[str, float]:
        """A row of metrics.jsonl."""
        stats = self.rollout_stats
        names = dict.fromkeys(
            name for output in self.train_stats.step_outputs for name in output.losses
        )
        metrics = {name: self.train_stats.mean(name) for name in names}
        if stats.reward is not None:
            metrics["reward"] = stats.reward
        metrics |= {f"reward/{task}": reward for task, reward in stats.rewards.items()}
        metrics |= {f"failures/{kind}": count for kind, count in stats.failures.items()}
        if len(self.task_tokens) > 1:
            total = max(1, sum(self.task_tokens.values()))
            shares = {task: tokens / total for task, tokens in self.task_tokens.items()}
            metrics |= {f"token_share/{task}": share for task, share in shares.items()}
        if self.engine_idle is not None:
            metrics["engine_idle"] = self.engine_idle
        if self.accept_length is not None:
            metrics["accept_length"] = self.accept_length
        for last in self.train_stats.step_outputs[-1:]:
            metrics |= {"grad_norm": last.grad_norm, "lr": last.lr}
        return metrics | {
            "staleness": sum(self.staleness) / max(1, len(self.staleness)),
            "staleness_max": max(self.staleness, default=0),
            "trainer_idle": self.trainer_idle,
            "zero_variance": stats.num_zero_variance / max(1, stats.num_groups),
            "truncated": stats.num_truncated / max(1, stats.num_rollouts),
            "tokens": self.train_stats.tokens,
            "step_time_s": self.seconds,
            "weight_sync_s": self.weight_sync_s,
        }


def policy_samples(group: RolloutGroup, settings: RLSettings) -> list[policy.PolicySample]:
    """The training samples of a group, with advantages from its rewards."""
    credit = assign_credit(group.rollouts, group.size, settings.credit_for(group.task))
    temperature = settings.sampling_for(group.task).temperature
    return [
        policy.PolicySample(sample=sample, weight=0.0, temperature=temperature)
        for sample in credit.samples
    ]


def task_teachers(settings: RLSettings) -> dict[str, TaskTeacher]:
    """The teacher of each task that has one."""
    return {
        name: TaskTeacher(task.teacher, task.teacher_weight)
        for name, task in settings.tasks.items()
        if task.teacher is not None
    }


def health_signals(
    train_stats: TrainStats, rollout_stats: RolloutStats, staleness: Sequence[int]
) -> HealthSignals:
    """The metrics that alerts are based on."""
    return HealthSignals(
        entropy=train_stats.mean("entropy"),
        logprob_diff=train_stats.mean("logprob_diff"),
        masked=train_stats.mean("masked"),
        num_groups=rollout_stats.num_groups,
        num_zero_variance=rollout_stats.num_zero_variance,
        staleness=max(staleness, default=0) + len(train_stats.step_outputs) - 1,
    )


def sampled_tokens(groups: Sequence[RolloutGroup], tasks: Iterable[str]) -> dict[str, int]:
    """Sampled tokens of the groups, by task."""
    counts = dict.fromkeys(tasks, 0)
    for group in groups:
        turns = (turn for branches in group.rollouts for b in branches for turn in b.turns)
        counts[group.task] += sum(len(turn.completion.token_ids) for turn in turns)
    return counts


def target_reached(recent: Sequence[float], settings: RLSettings) -> bool:
    """Whether the mean reward of the last `stop_window` batches is at least `stop_at_reward`."""
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
    """The loop and everything it works with."""

    batches: BatchSource
    learner: Learner
    publish_weights: WeightPublisher  # blocks until engines serve the new weights
    checkpoints: Path
    group_filter: GroupFilter
    teachers: Mapping[str, LogprobScorer] = field(default_factory=dict)
    extra_files: Mapping[str, bytes] = field(
        default_factory=dict
    )  # saved with each checkpoint: tokenizer, chat template
    on_update: Callable[[UpdateMetrics], None] = lambda _: None
    engine_busy_s: Callable[[], float] | None = None  # total busy time of the engines
    # Adds the experts that engines selected, for routing replay.
    add_routing: Callable[[Sequence[policy.PolicySample]], list[policy.PolicySample]] = list
    clock: Callable[[], float] = time.monotonic

    async def run(self) -> None:
        """Train until the batch source is exhausted or `stop_at_reward` is reached."""
        gc.collect()
        gc.freeze()  # or every collection scans all loaded objects again, in either thread
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
        if target_reached(recent, settings):  # in an earlier process
            return
        start, busy, sync_s = self.clock(), await self._busy(), 0.0
        while (batch := await self.batches.next_batch()) is not None:
            rollout_stats = self.group_filter.pop_stats()
            groups = await self._samples(batch.groups)
            accepted = await self._accept_length(groups) if learner.updates == 0 else None
            train_stats = await self.batches.await_or_fail(asyncio.to_thread(learner.train, groups))
            self.batches.mark_trained(batch)
            if rollout_stats.reward is not None:
                recent.append(rollout_stats.reward)
            final = train_stats.updates >= settings.steps or target_reached(recent, settings)
            if accepted is None and self._saves(final):
                accepted = await self._accept_length(groups)
            now, busy_now = self.clock(), await self._busy()
            self.on_update(
                UpdateMetrics(
                    update=train_stats.updates,
                    steps=settings.steps,
                    train_stats=train_stats,
                    rollout_stats=rollout_stats,
                    staleness=batch.staleness,
                    task_tokens=sampled_tokens(batch.groups, settings.tasks),
                    seconds=now - start,
                    data_wait_s=batch.wait_s,
                    weight_sync_s=sync_s,
                    engine_busy=(busy_now - busy) / max(now - start, 1e-9)
                    if self.engine_busy_s
                    else None,
                    accept_length=accepted,
                    alerts=tuple(
                        check_alerts(
                            health_signals(train_stats, rollout_stats, batch.staleness),
                            settings.alerts,
                        )
                    ),
                )
            )
            start, busy = now, busy_now
            # Logged before the checkpoint: a process killed in between logs it again on resume.
            sync_s = await self._sync_weights(final, recent)
            if final:
                return

    async def _busy(self) -> float:
        """Busy time of the engines. Read in a thread: an engine answers only between steps."""
        return (
            await self.batches.await_or_fail(asyncio.to_thread(self.engine_busy_s))
            if self.engine_busy_s
            else 0.0
        )

    async def _accept_length(self, groups: Sequence[Sequence[policy.PolicySample]]) -> float | None:
        """The acceptance length of MTP drafts on the sampled tokens of a batch."""
        measured = asyncio.to_thread(self.learner.accept_length, groups)
        return await self.batches.await_or_fail(measured)

    def _saves(self, final: bool) -> bool:
        """Whether a checkpoint follows the updates done, where engines get new weights."""
        settings = self.learner.settings
        return final or crosses_multiple(
            self.learner.updates, settings.rollout.updates_per_batch, settings.checkpoint.every
        )

    async def _samples(self, groups: Sequence[RolloutGroup]) -> list[list[policy.PolicySample]]:
        """The training samples of each group that has any, with teacher log-probabilities."""
        settings = self.learner.settings
        by_group = [policy_samples(group, settings) for group in groups]
        samples = self.add_routing([sample for group in by_group for sample in group])
        tasks = [group.task for group, own in zip(groups, by_group, strict=True) for _ in own]
        scored = iter(
            await add_teacher_logprobs(samples, tasks, task_teachers(settings), self.teachers)
        )
        return [[next(scored) for _ in own] for own in by_group if own]

    async def _sync_weights(self, final: bool, recent: deque[float]) -> float:
        """Weight sync every `sync_weights_every` updates: optimizer reset, checkpoint, publication.

        Returns the seconds that publishing took.
        """
        learner, settings = self.learner, self.learner.settings
        rollout = settings.rollout
        if not final and not crosses_multiple(
            learner.updates, rollout.updates_per_batch, rollout.sync_weights_every
        ):
            return 0.0
        # In deterministic mode this waits until nothing is in flight: tokens sampled with the old
        # weights are then in the ledger, and a resume does not need those weights.
        await self.batches.wait_quiescent()
        if settings.reset_optimizer:
            learner.reset_optimizer()
        if self._saves(final):
            learner.extra_state = {"rewards": list(recent), "tally": self.group_filter.state_dict()}
            saved = await asyncio.to_thread(
                learner.save, self.checkpoints, extra_files=dict(self.extra_files), final=final
            )
            self.batches.mark_checkpointed(learner.updates, saved.name)
        start = self.clock()
        # Not awaited alone: a stopped engine would keep a run that has already failed.
        await self.batches.await_or_fail(asyncio.to_thread(self.publish_weights, learner.weights()))
        self.batches.mark_published(learner.updates)
        return self.clock() - start
