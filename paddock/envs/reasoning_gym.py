"""The world `gym`: every generator of reasoning-gym, each with its own scorer.

Generators and scorers run in a worker. Some scorers evaluate the answer, so the worker must be
jailed, or its lack of a jail be accepted in so many words.
"""

import random
from contextlib import suppress
from difflib import get_close_matches
from functools import lru_cache
from importlib.util import find_spec
from threading import Thread
from typing import Annotated, Any

from pydantic import Field

from paddock.envs.answer_format import AnswerFormatName
from paddock.envs.datasets import QAExample, assign_split
from paddock.envs.env import Split
from paddock.envs.qa import QASettings, QATaskset
from paddock.envs.registry import EnvError
from paddock.envs.rewards import RewardScore
from paddock.envs.worker_pool import WorkerError, can_isolate, shared_pool

_TRIES = 200
_AHEAD = 16  # problems made before anyone asks for them


class ReasoningGymSettings(QASettings):
    """`dataset` names a generator; `config` sets it (`[config] min_terms = 3`)."""

    task_keys = (*QASettings.task_keys, "dataset", "config")

    answer_format: AnswerFormatName = "tag"
    dataset: str = "leg_counting"
    config: dict[str, Any] = Field(default_factory=dict)
    num_workers: Annotated[int, Field(ge=1)] = 1
    scorer_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    allow_unisolated: bool = False  # answers may be evaluated by a process that is not jailed

    def make_taskset(self) -> QATaskset:
        if not find_spec("reasoning_gym"):
            raise EnvError("reasoning-gym is not installed: pip install 'paddock[worlds]'")
        if not (can_isolate() or self.allow_unisolated):
            raise EnvError(
                "some scorers of reasoning-gym evaluate answers, and bubblewrap does not work here:"
                " install it (apt-get install bubblewrap), or say unisolated = true"
            )
        problems = ReasoningGymDataset(self)
        return self.make_qa_taskset("gym", problems, problems.verify)


class ReasoningGymDataset:
    """What one generator makes, without end. The answer of a problem may be empty: some generators
    have a scorer and no solution."""

    def __init__(self, settings: ReasoningGymSettings) -> None:
        self._settings = settings
        self._of = (settings.dataset, settings.config)
        self._workers = shared_pool(
            "paddock.envs.reasoning_gym:run_reasoning_gym",
            count=settings.num_workers,
            preload="reasoning_gym",
        )
        self._find = lru_cache(maxsize=4096)(self._searched)
        self._last: dict[Split, int] = {}  # row that was asked for
        self._made: dict[Split, int] = {}  # row up to which problems are being made ahead
        self._ask("make", 0)  # an unknown generator or setting is told now

    def size(self, split: Split) -> int | None:  # noqa: ARG002
        return None

    def row_index(self, split: Split, index: int) -> int:  # noqa: ARG002
        return index

    def example(self, split: Split, row: int) -> QAExample:
        """Whoever asks for one problem after the other is not to wait for the next ones."""
        problem = self._find(split, row)
        goes_on = row - 1 == self._last.get(split)
        self._last[split] = row
        if goes_on and self._made.get(split, row) < row + _AHEAD // 2:
            rows = range(max(row, self._made.get(split, row)) + 1, row + _AHEAD + 1)
            self._made[split] = rows[-1]
            # No part of a pool: what nobody waits for must not keep the process from ending.
            Thread(target=self._make, args=(split, rows), name="paddock-gym", daemon=True).start()
        return problem

    def _make(self, split: Split, rows: range) -> None:
        with suppress(Exception):  # whoever asks for that one is told
            for row in rows:
                self._find(split, row)

    async def verify(self, answer: str, problem: QAExample) -> RewardScore:
        """What the generator's own scorer says."""
        if "__" in answer:
            return RewardScore(0.0, "an answer with two underscores is not evaluated")
        call = ("score", *self._of, int(problem.hidden))
        seconds = self._settings.scorer_timeout_s
        # Where no solution is known, a scorer must at least live with a plain wrong answer.
        control = (*call, problem.answer or "0")
        found = await self._workers.call_with_control(
            *call, answer, control=control, seconds=seconds
        )
        return (
            RewardScore(0.0, "an answer that cannot be scored")
            if found is None
            else RewardScore(found)
        )

    def _searched(self, split: Split, row: int) -> QAExample:
        chance = random.Random(f"{self._settings.seed}/{row}")
        for _ in range(_TRIES):
            seed = chance.getrandbits(31)
            question, answer = self._ask("make", seed)
            if assign_split(question) == split:
                return QAExample(question=question, answer=answer, hidden=str(seed))
        name = self._settings.dataset
        raise EnvError(f"{_TRIES} problems of {name} were drawn, none for {split}: too few differ")

    def _ask(self, *call: Any) -> Any:
        try:
            return self._workers.call_blocking(call[0], *self._of, *call[1:], seconds=60.0)
        except WorkerError as error:
            raise EnvError(f"dataset {self._settings.dataset!r}: {error}") from None


def run_reasoning_gym(
    verb: str, dataset: str, config: dict[str, Any], seed: int, answer: str = ""
) -> Any:
    """Runs in a worker: make gives question and answer, score a number from 0 to 1."""
    from reasoning_gym.factory import DATASETS, create_dataset

    if dataset not in DATASETS:
        nearest = get_close_matches(dataset, DATASETS, n=3) or sorted(DATASETS)
        raise ValueError(f"there is no such generator; there are {', '.join(nearest)}")
    random.seed(seed)  # some generators draw from what all of Python shares
    source = create_dataset(dataset, seed=seed, size=1, **config)
    entry = source[0]
    if verb == "make":
        return entry["question"], str(entry["answer"] or "")
    return min(1.0, max(0.0, float(source.score_answer(answer, entry))))
