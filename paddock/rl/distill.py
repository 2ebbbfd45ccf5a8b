"""On-policy distillation across stages: the student writes, its teachers say how likely they would
have been to write the same, token by token.

A task of the run names its teacher and how much the teacher's opinion counts beside the task's own
reward; tasks and their ratios are the mixture of prompts. Teachers are engines that score what they
are shown; they never write.

S tokens of a sample.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paddock.records import TrainSample
from paddock.train import policy


class LogprobScorer(Protocol):
    """A teacher: an engine in this process, or a server."""

    async def __call__(self, token_ids: Sequence[int], start: int) -> Sequence[float]:
        """Log-probabilities of `token_ids[start:]`, each given all before it, at temperature 1."""


class DistillError(ValueError):
    """A teacher that cannot teach this run."""


@dataclass(frozen=True, slots=True)
class TaskTeacher:
    """A task's teacher, and how much its opinion weighs: nats of advantage a nat of lead."""

    teacher: str
    weight: float


async def add_teacher_logprobs(
    lessons: Sequence[policy.PolicySample],
    tasks: Sequence[str],
    teachings: Mapping[str, TaskTeacher],
    scores: Mapping[str, LogprobScorer],
) -> list[policy.PolicySample]:
    """The lessons, each of task `tasks[i]`, with what their teachers think of them; lessons of
    tasks without a teacher as they are. Copies of a sample are scored once."""
    wanted = {
        (teachings[task].teacher, lesson.sample.id): lesson.sample
        for lesson, task in zip(lessons, tasks, strict=True)
        if task in teachings
    }
    columns = await asyncio.gather(
        *(_opinion(scores[teacher], teacher, sample) for (teacher, _), sample in wanted.items())
    )
    opinions = dict(zip(wanted, columns, strict=True))
    found = []
    for lesson, task in zip(lessons, tasks, strict=True):
        teaching = teachings.get(task)
        if teaching is not None:
            opinion_S = opinions[teaching.teacher, lesson.sample.id]
            lesson = replace(lesson, teacher_logprob_S=opinion_S, teacher_weight=teaching.weight)
        found.append(lesson)
    return found


async def _opinion(score: LogprobScorer, teacher: str, sample: TrainSample) -> NDArray[np.float32]:
    """[S] of one sample; 0 before its first trained token."""
    start = sample.loss_mask.index(True)
    said = await score(sample.token_ids, start)
    if len(said) != len(sample.token_ids) - start:
        raise DistillError(
            f"teacher '{teacher}' scored {len(said)} tokens of {len(sample.token_ids) - start}"
        )
    if not all(map(isfinite, said)):
        raise DistillError(f"teacher '{teacher}' gave a token a score that is not finite")
    found = np.zeros(len(sample.token_ids), np.float32)
    found[start:] = said
    return found
