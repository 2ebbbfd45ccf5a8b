"""Datasets of question-answer examples: endless generators, or lists.

The split of a generated example is a hash of its text, so that no seed or setting can move a test
example into training.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from random import Random
from typing import Any, Protocol

from paddock.envs.env import Split
from paddock.envs.registry import EnvError
from paddock.records import Message

TEST_SPLIT_ONE_IN = 4  # one generated example in this many is a test example
_TRIES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class QAExample:
    question: str
    answer: str
    near: tuple[str, ...] = ()  # plausible wrong answers
    hidden: str = ""  # further data for the verifier: tests, a seed
    any_order: bool = False  # the answer is a set
    before: tuple[Message, ...] = field(default=(), repr=False)  # messages before the question
    columns: Mapping[str, Any] = field(default_factory=dict, repr=False)  # see Submission.columns
    row: Mapping[str, Any] = field(default_factory=dict, repr=False)  # of the file it is from


class QADataset(Protocol):
    """Examples by row; a row is always the same example."""

    def size(self, split: Split) -> int | None:
        """Number of rows; None: endless."""

    def row_index(self, split: Split, index: int) -> int:
        """The row of a task index."""

    def example(self, split: Split, row: int) -> QAExample: ...


def assign_split(text: str) -> Split:
    """The split of a text, by its hash.

    >>> {assign_split(f"What is {i} + {i}?") for i in range(30)} == {"train", "test"}
    True
    """
    digest = blake2b(text.encode(), digest_size=4).digest()
    return "test" if int.from_bytes(digest, "little") % TEST_SPLIT_ONE_IN == 0 else "train"


class GeneratedDataset:
    """An endless dataset of what `draw` generates."""

    def __init__(self, draw: Callable[[Random], QAExample], *, seed: int) -> None:
        self._draw, self._seed = draw, seed
        # The rollouts of a group need the same example at about the same time.
        self._example = lru_cache(maxsize=1024)(self._generate)

    def size(self, split: Split) -> int | None:  # noqa: ARG002
        return None

    def row_index(self, split: Split, index: int) -> int:  # noqa: ARG002
        return index

    def example(self, split: Split, row: int) -> QAExample:
        return self._example(split, row)

    def _generate(self, split: Split, row: int) -> QAExample:
        for attempt in range(_TRIES):
            example = self._draw(Random(f"{self._seed}/{row}/{attempt}"))
            if assign_split(example.question) == split:
                return example
        raise EnvError(
            f"none of {_TRIES} generated examples is in the {split} split: too few are distinct"
        )


class ListDataset:
    """Given examples, in epochs. Questions of the test split are removed from the train split."""

    def __init__(
        self, train: Sequence[QAExample], test: Sequence[QAExample], *, seed: int = 0
    ) -> None:
        test_prompts = {_prompt(example) for example in test}
        kept = tuple(example for example in train if _prompt(example) not in test_prompts)
        self._rows: dict[Split, tuple[QAExample, ...]] = {"train": kept, "test": tuple(test)}
        self._seed = seed

    def size(self, split: Split) -> int | None:
        return len(self._rows[split])

    def row_index(self, split: Split, index: int) -> int:
        count = len(self._rows[split])
        if not count:
            raise EnvError(f"no {split} examples; set '{split}_file'")
        return row_in_epochs(self._seed, index, count)

    def example(self, split: Split, row: int) -> QAExample:
        return self._rows[split][row]


def row_in_epochs(seed: int, index: int, count: int) -> int:
    """The row of an index over `count` rows: in order first, then reshuffled for each epoch."""
    epoch, position = divmod(index, count)
    return _order(seed, epoch, count)[position] if epoch else position


def _prompt(example: QAExample) -> str:
    return example.question if not example.before else repr((example.before, example.question))


@lru_cache(maxsize=8)
def _order(seed: int, epoch: int, count: int) -> tuple[int, ...]:
    rows = list(range(count))
    Random(f"{seed}/{epoch}").shuffle(rows)
    return tuple(rows)
