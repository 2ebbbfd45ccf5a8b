"""Where problems come from: a generator without end, or a list.

Whether a generated problem is one to train on or one to test with is read off its own text, so that
no seed and no setting can carry a test problem into training.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from random import Random
from typing import Protocol

from paddock.envs.env import Split
from paddock.envs.registry import EnvError

TEST_SPLIT_ONE_IN = 4  # one generated problem in this many is for testing
_TRIES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class QAExample:
    question: str
    answer: str
    near: tuple[str, ...] = ()  # wrong answers that a careless player gives
    hidden: str = ""  # what its grader needs besides: tests, a seed
    any_order: bool = False  # the answer is a set, its order does not matter


class QADataset(Protocol):
    """A source of problems, each at its row: the same row is always the same problem."""

    def size(self, split: Split) -> int | None:
        """How many rows there are; None: without end."""

    def row_index(self, split: Split, index: int) -> int:
        """The row of the index-th task."""

    def example(self, split: Split, row: int) -> QAExample: ...


def assign_split(text: str) -> Split:
    """The split to which a text belongs, for ever.

    >>> {assign_split(f"What is {i} + {i}?") for i in range(30)} == {"train", "test"}
    True
    """
    digest = blake2b(text.encode(), digest_size=4).digest()
    return "test" if int.from_bytes(digest, "little") % TEST_SPLIT_ONE_IN == 0 else "train"


class GeneratedDataset:
    """What `draw` makes of chance, without end."""

    def __init__(self, draw: Callable[[Random], QAExample], *, seed: int) -> None:
        self._draw, self._seed = draw, seed
        # A task is asked for, opened and tried by many at about the same time.
        self._at = lru_cache(maxsize=1024)(self._drawn)

    def size(self, split: Split) -> int | None:  # noqa: ARG002
        return None

    def row_index(self, split: Split, index: int) -> int:  # noqa: ARG002
        return index

    def example(self, split: Split, row: int) -> QAExample:
        return self._at(split, row)

    def _drawn(self, split: Split, row: int) -> QAExample:
        for attempt in range(_TRIES):
            problem = self._draw(Random(f"{self._seed}/{row}/{attempt}"))
            if assign_split(problem.question) == split:
                return problem
        raise EnvError(
            f"{_TRIES} problems were drawn and none is a {split} problem: too few differ"
        )


class ListDataset:
    """Problems that are there. The first pass is in their order, every later one shuffled anew.
    What is asked in the test split is left out of training."""

    def __init__(
        self, train: Sequence[QAExample], test: Sequence[QAExample], *, seed: int = 0
    ) -> None:
        asked = {problem.question for problem in test}
        kept = tuple(problem for problem in train if problem.question not in asked)
        self._rows: dict[Split, tuple[QAExample, ...]] = {"train": kept, "test": tuple(test)}
        self._seed = seed

    def size(self, split: Split) -> int | None:
        return len(self._rows[split])

    def row_index(self, split: Split, index: int) -> int:
        count = len(self._rows[split])
        if not count:
            raise EnvError(f"there are no {split} problems; name a file for them")
        again, place = divmod(index, count)
        return _order(self._seed, again, count)[place] if again else place

    def example(self, split: Split, row: int) -> QAExample:
        return self._rows[split][row]


@lru_cache(maxsize=8)
def _order(seed: int, again: int, count: int) -> tuple[int, ...]:
    rows = list(range(count))
    Random(f"{seed}/{again}").shuffle(rows)
    return tuple(rows)
