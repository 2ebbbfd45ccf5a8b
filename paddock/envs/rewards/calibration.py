"""How well a scorer agrees with answers whose worth is known, and what follows if it does not."""

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
    'JSONL, an answer of known worth a line: {"question", "answer", "score": 0 to 1} and, if there '
    'is one, "reference"'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationExample:
    """An answer and what people say it is worth, from 0 to 1."""

    question: str
    answer: str
    score: float
    reference: str = ""

    @property
    def submission(self) -> Submission:
        talk = (
            Message(role="user", content=self.question),
            Message(role="assistant", content=self.answer),
        )
        return Submission(messages=talk, answer=self.answer, reference=self.reference)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeAgreement:
    anchors: int
    within: float  # share of anchors whose score is near the known one
    ordered: float  # share of pairs of different worth that the scorer puts in the same order
    bias: float  # mean of score - known; above 0: too kind

    def __str__(self) -> str:
        return (
            f"{self.within:.0%} of {self.anchors} anchors agree, {self.ordered:.0%} of pairs are "
            f"in order, bias {self.bias:+.2f}"
        )


def read_calibration_file(path: str) -> tuple[CalibrationExample, ...]:
    """Anchors of a JSONL file: {"question", "answer", "score"} and, if there is one,
    "reference"."""
    found = []
    for row in read_rows(path):
        score = row.fields.get("score")
        if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1:
            raise RowError(f"{row.where}: 'score' is {score!r}, not a number from 0 to 1")
        reference = row.get_text("reference") if "reference" in row.fields else ""
        ask, said = row.get_text("question"), row.get_text("answer")
        found.append(
            CalibrationExample(question=ask, answer=said, score=score, reference=reference)
        )
    if len({anchor.score for anchor in found}) < 2:
        raise RowError(f"{path}: anchors must have at least two different scores")
    return tuple(found)


async def measure_agreement(
    scorer: RewardFunc,
    anchors: Sequence[CalibrationExample],
    *,
    near: float = 0.25,
    at_once: int = 8,
) -> JudgeAgreement:
    """The scorer against the anchors, `at_once` asked together."""
    gate = asyncio.Semaphore(at_once)

    async def ask(anchor: CalibrationExample) -> float:
        async with gate:
            return (await scorer(anchor.submission)).value

    said = await asyncio.gather(*map(ask, anchors))
    known = [anchor.score for anchor in anchors]
    pairs = [
        (said[i] - said[j]) * (known[i] - known[j]) > 0
        for i, j in combinations(range(len(known)), 2)
        if known[i] != known[j]
    ]
    return JudgeAgreement(
        anchors=len(known),
        within=fmean(abs(s - k) <= near + 1e-9 for s, k in zip(said, known, strict=True)),
        ordered=fmean(pairs) if pairs else 1.0,
        bias=fmean(s - k for s, k in zip(said, known, strict=True)),
    )


class CalibratedReward:
    """A scorer that is asked about the anchors first, once, and gives no score while it agrees with
    fewer of them than `least`."""

    def __init__(
        self, scorer: RewardFunc, anchors: Sequence[CalibrationExample], *, least: float
    ) -> None:
        self._scorer, self._anchors, self._least = scorer, anchors, least
        self._lock = asyncio.Lock()
        self.agreement: JudgeAgreement | None = None

    async def calibrate(self) -> JudgeAgreement:
        async with self._lock:
            if self.agreement is None:
                self.agreement = await measure_agreement(self._scorer, self._anchors)
        return self.agreement

    async def __call__(self, work: Submission) -> RewardScore:
        found = self.agreement or await self.calibrate()
        if found.within < self._least:
            what = f"{found}; {self._least:.0%} must agree"
            raise RolloutFailed("grader", "calibration", what)
        return await self._scorer(work)
