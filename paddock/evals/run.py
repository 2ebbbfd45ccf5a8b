"""A model in a world, many tasks at once."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pydantic import NonNegativeInt, PositiveInt

from paddock.config import BaseSettings
from paddock.envs import RolloutTrace, Split, Taskset
from paddock.evals.score import EvalError, Score, score
from paddock.records import Task

Plays = Callable[[Task, int], Awaitable[RolloutTrace]]  # a task, and which attempt at it this is
Watch = Callable[[RolloutTrace], None]


class EvalSettings(BaseSettings):
    """Which tasks are played, and how."""

    tasks: PositiveInt = 200
    first: NonNegativeInt = 0  # index of the first task
    attempts: PositiveInt = 1  # at each task
    split: Split = "test"
    at_once: PositiveInt = 64
    passing: float = 1.0  # the least reward that solves a task


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    world: str
    score: Score
    episodes: tuple[tuple[RolloutTrace, ...], ...]  # by task, then by attempt


async def evaluate(
    world: Taskset,
    plays: Plays,
    settings: EvalSettings,
    *,
    watch: Watch | None = None,
) -> Evaluation:
    """Play tasks of a world. Always the same ones for the same settings; a finite world is not
    asked for more than it has."""
    indices = range(settings.first, settings.first + settings.tasks)
    size = world.size(settings.split)
    chosen = [world.task(i, settings.split) for i in indices if size is None or i < size]
    if not chosen:
        has = f"world '{world.name}' has {size} {settings.split} tasks"
        raise EvalError(f"{has}, none from number {settings.first} on: there is nothing to play")
    gate = asyncio.Semaphore(settings.at_once)

    async def one(task: Task, attempt: int) -> RolloutTrace:
        async with gate:
            episode = await plays(task, attempt)
        if watch is not None:
            watch(episode)
        return episode

    async with asyncio.TaskGroup() as group:
        running = [
            [group.create_task(one(task, attempt)) for attempt in range(settings.attempts)]
            for task in chosen
        ]
    episodes = tuple(tuple(task.result() for task in attempted) for attempted in running)
    return Evaluation(
        world=world.name, score=score(episodes, passing=settings.passing), episodes=episodes
    )
