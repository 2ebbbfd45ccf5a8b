"""A model in a world, many tasks at once."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pydantic import NonNegativeInt, PositiveInt

from paddock.config import BaseSettings
from paddock.envs import RolloutTrace, Split, Taskset
from paddock.evals.metrics import EvalError, EvalMetrics, compute_metrics
from paddock.records import Task

RunRollout = Callable[
    [Task, int], Awaitable[RolloutTrace]
]  # a task, and which attempt at it this is
OnRollout = Callable[[RolloutTrace], None]


class EvalSettings(BaseSettings):
    """Which tasks are played, and how."""

    num_tasks: PositiveInt = 200
    first_task: NonNegativeInt = 0  # index of the first task
    rollouts_per_task: PositiveInt = 1  # at each task
    split: Split = "test"
    max_concurrent: PositiveInt = 64
    pass_threshold: float = 1.0  # the least reward that solves a task


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    env: str
    metrics: EvalMetrics
    rollouts: tuple[tuple[RolloutTrace, ...], ...]  # by task, then by attempt


async def evaluate(
    world: Taskset,
    plays: RunRollout,
    settings: EvalSettings,
    *,
    watch: OnRollout | None = None,
) -> EvalResult:
    """Play tasks of a world. Always the same ones for the same settings; a finite world is not
    asked for more than it has."""
    indices = range(settings.first_task, settings.first_task + settings.num_tasks)
    size = world.size(settings.split)
    chosen = [world.task(i, settings.split) for i in indices if size is None or i < size]
    if not chosen:
        has = f"env '{world.name}' has {size} {settings.split} tasks"
        raise EvalError(f"{has}, none from number {settings.first_task} on: no tasks to evaluate")
    gate = asyncio.Semaphore(settings.max_concurrent)

    async def one(task: Task, attempt: int) -> RolloutTrace:
        async with gate:
            episode = await plays(task, attempt)
        if watch is not None:
            watch(episode)
        return episode

    async with asyncio.TaskGroup() as group:
        running = [
            [group.create_task(one(task, attempt)) for attempt in range(settings.rollouts_per_task)]
            for task in chosen
        ]
    episodes = tuple(tuple(task.result() for task in attempted) for attempted in running)
    return EvalResult(
        env=world.name,
        metrics=compute_metrics(episodes, passing=settings.pass_threshold),
        rollouts=episodes,
    )
