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

from paddock.envs.registry import WorldError
from paddock.envs.world import Split

TEST_SHARE = 4  # one generated problem in this many is for testing
_TRIES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    question: str
    answer: str
    near: tuple[str, ...] = ()  # wrong answers that a careless player gives
    hidden: str = ""  # what its grader needs besides: tests, a seed
    any_order: bool = False  # the answer is a set, its order does not matter


class Problems(Protocol):
    """A source of problems, each at its row: the same row is always the same problem."""

    def size(self, split: Split) -> int | None:
        """How many rows there are; None: without end."""

    def row(self, split: Split, index: int) -> int:
        """The row of the index-th task."""

    def at(self, split: Split, row: int) -> Problem: ...


def split_of(text: str) -> Split:
    """The split to which a text belongs, for ever.

    >>> {split_of(f"What is {i} + {i}?") for i in range(30)} == {"train", "test"}
    True
    """
    digest = blake2b(text.encode(), digest_size=4).digest()
    return "test" if int.from_bytes(digest, "little") % TEST_SHARE == 0 else "train"


class Generated:
    """What `draw` makes of chance, without end."""

    def __init__(self, draw: Callable[[Random], Problem], *, seed: int) -> None:
        self._draw, self._seed = draw, seed
        # A task is asked for, opened and tried by many at about the same time.
        self._at = lru_cache(maxsize=1024)(self._drawn)

    def size(self, split: Split) -> int | None:  # noqa: ARG002
        return None

    def row(self, split: Split, index: int) -> int:  # noqa: ARG002
        return index

    def at(self, split: Split, row: int) -> Problem:
        return self._at(split, row)

    def _drawn(self, split: Split, row: int) -> Problem:
        for attempt in range(_TRIES):
            problem = self._draw(Random(f"{self._seed}/{row}/{attempt}"))
            if split_of(problem.question) == split:
                return problem
        raise WorldError(
            f"{_TRIES} problems were drawn and none is a {split} problem: too few differ"
        )


class Listed:
    """Problems that are there. The first pass is in their order, every later one shuffled anew.
    What is asked in the test split is left out of training."""

    def __init__(self, train: Sequence[Problem], test: Sequence[Problem], *, seed: int = 0) -> None:
        asked = {problem.question for problem in test}
        kept = tuple(problem for problem in train if problem.question not in asked)
        self._rows: dict[Split, tuple[Problem, ...]] = {"train": kept, "test": tuple(test)}
        self._seed = seed

    def size(self, split: Split) -> int | None:
        return len(self._rows[split])

    def row(self, split: Split, index: int) -> int:
        count = len(self._rows[split])
        if not count:
            raise WorldError(f"there are no {split} problems; name a file for them")
        again, place = divmod(index, count)
        return _order(self._seed, again, count)[place] if again else place

    def at(self, split: Split, row: int) -> Problem:
        return self._rows[split][row]


@lru_cache(maxsize=8)
def _order(seed: int, again: int, count: int) -> tuple[int, ...]:
    rows = list(range(count))
    Random(f"{seed}/{again}").shuffle(rows)
    return tuple(rows)
