"""The worlds of mathematics: generated, or of a file; with a Python tool, if it is asked for."""

from random import Random
from typing import Annotated, Literal

from pydantic import Field

from paddock.envs.answers import FormName
from paddock.envs.ask import AskSettings, AskWorld, Check, FileSettings, by_plain_text
from paddock.envs.math import generate
from paddock.envs.math.equal import by_algebra
from paddock.envs.math.files import problem
from paddock.envs.problems import Generated, Problem, Problems
from paddock.envs.rows import Row

Checker = Literal["plain", "algebra"]


class MathSettings(AskSettings):
    shaped_by = (*AskSettings.shaped_by, "families", "level")

    families: tuple[generate.Family, ...] = Field(tuple(generate.FAMILIES), min_length=1)
    level: Annotated[int, Field(ge=1, le=generate.LEVELS)] = 2

    def world(self) -> AskWorld:
        def draw(rng: Random) -> Problem:
            return generate.draw(rng, self.families, self.level)

        return self.asking("math", Generated(draw, seed=self.seed), by_plain_text)


class MathFileSettings(FileSettings):
    """Files in the layout of GSM8K or MATH."""

    row_format = (
        '{"question", "answer": "... #### 72"} as in GSM8K, or {"problem", and "solution" with a '
        '\\boxed answer or "answer"} as in MATH'
    )

    form: FormName = "boxed"
    correct: float = 1.0
    checker: Checker = "algebra"  # plain: numbers and letters only, and needs no extra
    workers: Annotated[int, Field(ge=1)] = 1  # processes that do algebra
    checker_seconds: Annotated[float, Field(gt=0)] = 10.0

    def problem(self, row: Row) -> Problem | None:
        return problem(row)

    def over(self, problems: Problems) -> AskWorld:
        return self.asking("math-file", problems, self._check())

    def _check(self) -> Check:
        if self.checker == "plain":
            return by_plain_text
        return by_algebra(count=self.workers, seconds=self.checker_seconds)
