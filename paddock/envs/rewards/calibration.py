"""Calibration: agreement of a reward function with human scores, as a precondition for its use."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from paddock.envs.env import RolloutFailed
from paddock.envs.jsonl import RowError, read_rows
from paddock.envs.rewards.reward import RewardFunc, RewardScore, Submission
from paddock.records import Message

CALIBRATION_FILE_FORMAT = (
    'JSONL, one answer with a human score per line: {"question", "answer", "score": 0 to 1} and '
    'optionally "reference"'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationExample:
    """An answer with a human score from 0 to 1."""

    question: str
    answer: str
    score: float
    reference: str = ""

    @property
    def submission(self) -> Submission:
        messages = (
            Message(role="user", content=self.question),
            Message(role="assistant", content=self.answer),
        )
        return Submission(messages=messages, answer=self.answer, reference=self.reference)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeAgreement:
    num_examples: int
    within: float  # fraction of examples with a score near the human one
    ordered: float  # fraction of pairs with different human scores that are ordered alike
    bias: float  # mean of score - human score; above 0: too lenient

    def __str__(self) -> str:
        return (
            f"{self.within:.0%} of {self.num_examples} calibration examples agree, "
            f"{self.ordered:.0%} of pairs are ordered alike, bias {self.bias:+.2f}"
        )


def read_calibration_file(path: str) -> tuple[CalibrationExample, ...]:
    """Read calibration examples: {"question", "answer", "score"} and optionally "reference"."""
    found = []
    for row in read_rows(path):
        score = row.fields.get("score")
        if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1:
            raise RowError(f"{row.where}: 'score' must be a number from 0 to 1, got {score!r}")
        reference = row.get_text("reference") if "reference" in row.fields else ""
        question, answer = row.get_text("question"), row.get_text("answer")
        found.append(
            CalibrationExample(question=question, answer=answer, score=score, reference=reference)
        )
    if len({example.score for example in found}) < 2:
        raise RowError(f"{path}: at least two different scores are required")
    return tuple(found)


async def measure_agreement(
    reward_func: RewardFunc,
    examples: Sequence[CalibrationExample],
    *,
    tolerance: float = 0.25,
    max_concurrency: int = 8,
) -> JudgeAgreement:
    """Score the examples and compare with the human scores."""
    gate = asyncio.Semaphore(max_concurrency)

    async def score(example: CalibrationExample) -> float:
        async with gate:
            return (await reward_func(example.submission)).value

    scores = await asyncio.gather(*map(score, examples))
    known = [example.score for example in examples]
    pairs = [
        (scores[i] - scores[j]) * (known[i] - known[j]) > 0
        for i, j in combinations(range(len(known)), 2)
        if known[i] != known[j]
    ]
    return JudgeAgreement(
        num_examples=len(known),
        within=fmean(abs(s - k) <= tolerance + 1e-9 for s, k in zip(scores, known, strict=True)),
        ordered=fmean(pairs) if pairs else 1.0,
        bias=fmean(s - k for s, k in zip(scores, known, strict=True)),
    )


class CalibratedReward:
    """A reward function that scores the calibration examples first, once, and fails all rollouts if
    fewer than `min_agreement` of them agree."""

    def __init__(
        self,
        reward_func: RewardFunc,
        examples: Sequence[CalibrationExample],
        *,
        min_agreement: float,
    ) -> None:
        self._reward_func, self._examples = reward_func, examples
        self._min_agreement = min_agreement
        self._lock = asyncio.Lock()
        self.agreement: JudgeAgreement | None = None

    async def calibrate(self) -> JudgeAgreement:
        async with self._lock:
            if self.agreement is None:
                self.agreement = await measure_agreement(self._reward_func, self._examples)
        return self.agreement

    async def __call__(self, submission: Submission) -> RewardScore:
        found = self.agreement or await self.calibrate()
        if found.within < self._min_agreement:
            what = f"{found}; {self._min_agreement:.0%} must agree"
            raise RolloutFailed("grader", "calibration", what)
        return await self._reward_func(submission)
