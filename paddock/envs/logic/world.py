"""The world `logic`: puzzles of several families, each with exactly one solution."""

import re
from collections.abc import Callable
from random import Random
from typing import Annotated, Literal

from pydantic import Field

from paddock.envs.answers import FormName
from paddock.envs.ask import AskSettings, AskWorld
from paddock.envs.logic.circuit import circuit
from paddock.envs.logic.knights import knights
from paddock.envs.logic.order import houses, ordering
from paddock.envs.problems import Generated, Problem
from paddock.envs.rewards import Score

Family = Literal["knights", "ordering", "houses", "circuit"]
FAMILIES: dict[Family, Callable[[Random, int], Problem]] = {
    "knights": knights,
    "ordering": ordering,
    "houses": houses,
    "circuit": circuit,
}


class LogicSettings(AskSettings):
    shaped_by = (*AskSettings.shaped_by, "families", "level")

    form: FormName = "line"
    families: tuple[Family, ...] = Field(tuple(FAMILIES), min_length=1)
    level: Annotated[int, Field(ge=1, le=5)] = 2

    def world(self) -> AskWorld:
        def draw(rng: Random) -> Problem:
            return FAMILIES[rng.choice(self.families)](rng, self.level)

        return self.asking("logic", Generated(draw, seed=self.seed), check)


async def check(answer: str, problem: Problem) -> Score:
    """Right if the same things are listed, in order; of a set, in any order."""
    said, right = _items(answer), _items(problem.answer)
    if problem.any_order:
        said, right = sorted(said), sorted(right)
    return Score(float(said == right))


def _items(text: str) -> list[str]:
    """
    >>> _items("Oak, **elm** and the fir.")
    ['oak', 'elm', 'fir']
    """
    pieces = re.split(r",|;|\band\b|->", text.lower())
    bare = [piece.strip(" .*`'\"()[]\n").removeprefix("the ") for piece in pieces]
    return [piece for piece in bare if piece]
