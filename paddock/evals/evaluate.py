"""Evaluation: run the tasks of an environment concurrently and compute metrics."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pydantic import NonNegativeInt, PositiveInt

from paddock.config import BaseSettings
from paddock.envs import RolloutTrace, Split, Taskset
from paddock.evals.metrics import EvalError, EvalMetrics, compute_metrics
from paddock.records import Task

RunRollout = Callable[[Task, int], Awaitable[RolloutTrace]]  # task, index of the rollout
OnRollout = Callable[[RolloutTrace], None]


class EvalSettings(BaseSettings):
    """Which tasks are evaluated, and how."""

    num_tasks: PositiveInt = 200
    first_task: NonNegativeInt = 0
    rollouts_per_task: PositiveInt = 1
    split: Split = "test"
    max_concurrent: PositiveInt = 64
    pass_threshold: float = 1.0  # minimum reward that solves a task


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    env: str
    metrics: EvalMetrics
    rollouts: tuple[tuple[RolloutTrace, ...], ...]  # by task, then by rollout index


async def evaluate(
    taskset: Taskset,
    run_rollout: RunRollout,
    settings: EvalSettings,
    *,
    on_rollout: OnRollout | None = None,
) -> EvalResult:
    """Evaluate tasks of an environment; the same settings always select the same tasks.

    `on_rollout` is called with each finished rollout. Raises EvalError if the environment has no
    task in the range, or too few rollouts could be scored.
    """
    indices = range(settings.first_task, settings.first_task + settings.num_tasks)
    size = taskset.size(settings.split)
    tasks = [taskset.task(i, settings.split) for i in indices if size is None or i < size]
    if not tasks:
        has = f"env '{taskset.name}' has {size} {settings.split} tasks"
        raise EvalError(f"{has}, none from index {settings.first_task} on: no tasks to evaluate")
    semaphore = asyncio.Semaphore(settings.max_concurrent)

    async def run_one(task: Task, index: int) -> RolloutTrace:
        async with semaphore:
            rollout = await run_rollout(task, index)
        if on_rollout is not None:
            on_rollout(rollout)
        return rollout

    async with asyncio.TaskGroup() as group:
        running = [
            [group.create_task(run_one(task, i)) for i in range(settings.rollouts_per_task)]
            for task in tasks
        ]
    rollouts = tuple(tuple(each.result() for each in same_task) for same_task in running)
    return EvalResult(
        env=taskset.name,
        metrics=compute_metrics(rollouts, pass_threshold=settings.pass_threshold),
        rollouts=rollouts,
    )
