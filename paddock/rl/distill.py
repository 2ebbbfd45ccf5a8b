"""On-policy distillation: teachers score the tokens that the student sampled.

A task names its teacher and the weight of the teacher's log-probability difference relative to the
task's own reward; tasks and their ratios are the prompt mixture. Teachers only score, they never
generate.

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
    """A teacher: an engine in this process or a server."""

    async def __call__(self, token_ids: Sequence[int], start: int) -> Sequence[float]:
        """Log-probabilities of `token_ids[start:]`, each given all before it, at temperature 1."""


class DistillError(ValueError):
    """A teacher returned scores that cannot be used."""


@dataclass(frozen=True, slots=True)
class TaskTeacher:
    """The teacher of a task, and the advantage per nat of teacher-student difference."""

    teacher: str
    weight: float


async def add_teacher_logprobs(
    samples: Sequence[policy.PolicySample],
    tasks: Sequence[str],
    task_teachers: Mapping[str, TaskTeacher],
    scorers: Mapping[str, LogprobScorer],
) -> list[policy.PolicySample]:
    """The samples, each of task `tasks[i]`, with the log-probabilities of their teachers.

    Samples of tasks without a teacher are unchanged. Copies of a sample are scored once. Raises
    DistillError if a teacher returns the wrong number of scores or a non-finite one.
    """
    to_score = {
        (task_teachers[task].teacher, each.sample.id): each.sample
        for each, task in zip(samples, tasks, strict=True)
        if task in task_teachers
    }
    columns = await asyncio.gather(
        *(_score(scorers[teacher], teacher, sample) for (teacher, _), sample in to_score.items())
    )
    scores = dict(zip(to_score, columns, strict=True))
    scored = []
    for each, task in zip(samples, tasks, strict=True):
        own = task_teachers.get(task)
        if own is not None:
            logprob_S = scores[own.teacher, each.sample.id]
            each = replace(each, teacher_logprob_S=logprob_S, teacher_weight=own.weight)
        scored.append(each)
    return scored


async def _score(scorer: LogprobScorer, teacher: str, sample: TrainSample) -> NDArray[np.float32]:
    """[S] of one sample; 0 before its first trained token."""
    start = sample.loss_mask.index(True)
    logprobs = await scorer(sample.token_ids, start)
    if len(logprobs) != len(sample.token_ids) - start:
        raise DistillError(
            f"teacher '{teacher}' scored {len(logprobs)} tokens of {len(sample.token_ids) - start}"
        )
    if not all(map(isfinite, logprobs)):
        raise DistillError(f"teacher '{teacher}' gave a token a score that is not finite")
    column_S = np.zeros(len(sample.token_ids), np.float32)
    column_S[start:] = logprobs
    return column_S
