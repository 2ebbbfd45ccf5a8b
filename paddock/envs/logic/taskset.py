"""Environment `logic`: puzzles of several families, each with exactly one solution."""

import re
from collections.abc import Callable
from random import Random
from typing import Annotated, Literal

from pydantic import Field

from paddock.envs.answer_format import AnswerFormatName
from paddock.envs.datasets import GeneratedDataset, QAExample
from paddock.envs.logic.circuit import generate_circuit
from paddock.envs.logic.knights import generate_knights
from paddock.envs.logic.order import generate_houses, generate_ordering
from paddock.envs.qa import QASettings, QATaskset
from paddock.envs.rewards import RewardScore

Family = Literal["knights", "ordering", "houses", "circuit"]
FAMILIES: dict[Family, Callable[[Random, int], QAExample]] = {
    "knights": generate_knights,
    "ordering": generate_ordering,
    "houses": generate_houses,
    "circuit": generate_circuit,
}


class LogicSettings(QASettings):
    task_keys = (*QASettings.task_keys, "families", "level")

    answer_format: AnswerFormatName = "line"
    families: tuple[Family, ...] = Field(tuple(FAMILIES), min_length=1)
    level: Annotated[int, Field(ge=1, le=5)] = 2

    def make_taskset(self) -> QATaskset:
        def draw(rng: Random) -> QAExample:
            return FAMILIES[rng.choice(self.families)](rng, self.level)

        return self.make_qa_taskset("logic", GeneratedDataset(draw, seed=self.seed), verify)


async def verify(answer: str, problem: QAExample) -> RewardScore:
    """Reward 1 if the answer lists the same items in order, or in any order for `any_order`."""
    given, right = _items(answer), _items(problem.answer)
    if problem.any_order:
        given, right = sorted(given), sorted(right)
    return RewardScore(float(given == right))


def _items(text: str) -> list[str]:
    """Normalized items of a list.

    >>> _items("Oak, **elm** and the fir.")
    ['oak', 'elm', 'fir']
    """
    pieces = re.split(r",|;|\band\b|->", text.lower())
    bare = [piece.strip(" .*`'\"()[]\n").removeprefix("the ") for piece in pieces]
    return [piece for piece in bare if piece]
