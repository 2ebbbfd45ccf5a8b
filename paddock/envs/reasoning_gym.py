"""Environment `gym`: all generators of reasoning-gym, each with its own scorer.

Generators and scorers run in a worker process. Some scorers evaluate the answer as code, so the
worker must be isolated, or `allow_unisolated` be set.
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
_PREFETCH = 16  # examples generated ahead


class ReasoningGymSettings(QASettings):
    """`dataset` is the name of a generator, `config` its options (`[config] min_terms = 3`)."""

    task_keys = (*QASettings.task_keys, "dataset", "config")

    answer_format: AnswerFormatName = "tag"
    dataset: str = "leg_counting"
    config: dict[str, Any] = Field(default_factory=dict)
    num_workers: Annotated[int, Field(ge=1)] = 1
    scorer_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    allow_unisolated: bool = False  # answers may be evaluated in a process without isolation

    def make_taskset(self) -> QATaskset:
        if not find_spec("reasoning_gym"):
            raise EnvError("reasoning-gym is not installed: pip install 'paddock[envs]'")
        if not (can_isolate() or self.allow_unisolated):
            raise EnvError(
                "some scorers of reasoning-gym evaluate answers, and bubblewrap does not work here:"
                " install it (apt-get install bubblewrap), or set allow_unisolated = true"
            )
        dataset = ReasoningGymDataset(self)
        return self.make_qa_taskset("gym", dataset, dataset.verify)


class ReasoningGymDataset:
    """Examples of one generator, without end. The answer of an example may be empty: some
    generators have a scorer but no solution."""

    def __init__(self, settings: ReasoningGymSettings) -> None:
        self._settings = settings
        self._generator = (settings.dataset, settings.config)
        self._workers = shared_pool(
            "paddock.envs.reasoning_gym:run_reasoning_gym",
            count=settings.num_workers,
            preload=("reasoning_gym",),
        )
        self._find = lru_cache(maxsize=4096)(self._generate)
        self._last: dict[Split, int] = {}  # last requested row
        self._prefetched: dict[Split, int] = {}  # last row that is being prefetched
        self._call("make", 0)  # raises now for an unknown generator or option

    def size(self, split: Split) -> int | None:  # noqa: ARG002
        return None

    def row_index(self, split: Split, index: int) -> int:  # noqa: ARG002
        return index

    def example(self, split: Split, row: int) -> QAExample:
        """The example of a row. Sequential access prefetches the next rows."""
        example = self._find(split, row)
        is_sequential = row - 1 == self._last.get(split)
        self._last[split] = row
        if is_sequential and self._prefetched.get(split, row) < row + _PREFETCH // 2:
            rows = range(max(row, self._prefetched.get(split, row)) + 1, row + _PREFETCH + 1)
            self._prefetched[split] = rows[-1]
            # A daemon thread, not a pool: prefetching must not keep the process from exiting.
            Thread(
                target=self._prefetch, args=(split, rows), name="paddock-gym", daemon=True
            ).start()
        return example

    def _prefetch(self, split: Split, rows: range) -> None:
        with suppress(Exception):  # raised again when that row is requested
            for row in rows:
                self._find(split, row)

    async def verify(self, answer: str, example: QAExample) -> RewardScore:
        """The score of the generator's own scorer."""
        if "__" in answer:
            return RewardScore(0.0, "an answer with two underscores is not evaluated")
        call = ("score", *self._generator, int(example.hidden))
        seconds = self._settings.scorer_timeout_s
        # Without a known solution, a scorer must at least handle a plain wrong answer.
        control = (*call, example.answer or "0")
        found = await self._workers.call_with_control(
            *call, answer, control=control, seconds=seconds
        )
        return (
            RewardScore(0.0, "an answer that cannot be scored")
            if found is None
            else RewardScore(found)
        )

    def _generate(self, split: Split, row: int) -> QAExample:
        rng = random.Random(f"{self._settings.seed}/{row}")
        for _ in range(_TRIES):
            seed = rng.getrandbits(31)
            question, answer = self._call("make", seed)
            if assign_split(question) == split:
                return QAExample(question=question, answer=answer, hidden=str(seed))
        name = self._settings.dataset
        raise EnvError(
            f"none of {_TRIES} generated examples of {name} is in the {split} split: "
            "too few distinct examples"
        )

    def _call(self, *call: Any) -> Any:
        try:
            return self._workers.call_blocking(call[0], *self._generator, *call[1:], seconds=60.0)
        except WorkerError as error:
            raise EnvError(f"dataset {self._settings.dataset!r}: {error}") from None


def run_reasoning_gym(
    command: str, dataset: str, config: dict[str, Any], seed: int, answer: str = ""
) -> Any:
    """Runs in a worker: "make" returns question and answer, "score" a number from 0 to 1."""
    from reasoning_gym.factory import DATASETS, create_dataset

    if dataset not in DATASETS:
        nearest = get_close_matches(dataset, DATASETS, n=3) or sorted(DATASETS)
        raise ValueError(f"generator not found; similar names: {', '.join(nearest)}")
    random.seed(seed)  # some generators use the global random state
    source = create_dataset(dataset, seed=seed, size=1, **config)
    entry = source[0]
    if command == "make":
        return entry["question"], str(entry["answer"] or "")
    return min(1.0, max(0.0, float(source.score_answer(answer, entry))))
