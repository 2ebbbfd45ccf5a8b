"""The worlds of code: functions to write, generated or of a file, graded by hidden tests."""

from random import Random
from typing import Annotated

from pydantic import Field

from paddock.envs.answers import FormName
from paddock.envs.ask import AskSettings, AskWorld, Check, FileSettings
from paddock.envs.code import generate
from paddock.envs.code.files import problem
from paddock.envs.code.grade import by_tests
from paddock.envs.problems import Generated, Problem, Problems
from paddock.envs.rows import Row
from paddock.envs.sandbox import SandboxSettings


class CodeSettings(AskSettings):
    shaped_by = (*AskSettings.shaped_by, "families", "level")

    form: FormName = "code"
    families: tuple[generate.Family, ...] = Field(("numbers", "texts"), min_length=1)
    level: Annotated[int, Field(ge=1, le=generate.LEVELS)] = 2  # steps of a function
    partly: bool = False  # the share of tests that pass, instead of all or nothing
    test_seconds: Annotated[float, Field(gt=0)] = 10.0
    sandbox: SandboxSettings = SandboxSettings()
    warm: Annotated[int, Field(ge=0)] = 2  # sandboxes kept ready for tests

    def world(self) -> AskWorld:
        def draw(rng: Random) -> Problem:
            return generate.draw(rng, self.families, self.level)

        return self.asking("code", Generated(draw, seed=self.seed), self.check())

    def check(self) -> Check:
        return by_tests(self.sandbox, seconds=self.test_seconds, partly=self.partly, warm=self.warm)


class CodeFileSettings(FileSettings):
    """Files in the layout of HumanEval or MBPP."""

    row_format = (
        '{"prompt", "entry_point", "test", "canonical_solution"} as in HumanEval, or {"text" or '
        '"prompt", "code", "test_list"} as in MBPP'
    )

    form: FormName = "code"
    correct: float = 1.0
    partly: bool = False
    test_seconds: Annotated[float, Field(gt=0)] = 10.0
    sandbox: SandboxSettings = SandboxSettings()
    warm: Annotated[int, Field(ge=0)] = 2

    def problem(self, row: Row) -> Problem:
        return problem(row)

    def over(self, problems: Problems) -> AskWorld:
        check = by_tests(
            self.sandbox, seconds=self.test_seconds, partly=self.partly, warm=self.warm
        )
        return self.asking("code-file", problems, check)
