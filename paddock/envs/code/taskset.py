"""Environments `code` and `code-file`: functions to write, scored by hidden unit tests."""

from random import Random
from typing import Annotated

from pydantic import Field

from paddock.envs.answer_format import AnswerFormatName
from paddock.envs.code import generate
from paddock.envs.code.rows import parse_row
from paddock.envs.code.verifier import make_test_verifier
from paddock.envs.datasets import GeneratedDataset, QADataset, QAExample
from paddock.envs.jsonl import JsonRow
from paddock.envs.qa import AnswerVerifier, QAFileSettings, QASettings, QATaskset
from paddock.sandbox import SandboxSettings


class CodeSettings(QASettings):
    """Settings of env "code"."""

    task_keys = (*QASettings.task_keys, "families", "level")

    answer_format: AnswerFormatName = "code"
    families: tuple[generate.Family, ...] = Field(("numbers", "texts"), min_length=1)
    level: Annotated[int, Field(ge=1, le=generate.LEVELS)] = 2  # steps per function
    partial_credit: bool = False  # reward is the share of passed tests, not 0 or 1
    test_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    sandbox: SandboxSettings = SandboxSettings()
    warm_sandboxes: Annotated[int, Field(ge=0)] = 2  # started in advance

    def make_taskset(self) -> QATaskset:
        def draw(rng: Random) -> QAExample:
            return generate.generate_example(rng, self.families, self.level)

        return self.make_qa_taskset(
            "code", GeneratedDataset(draw, seed=self.seed), self.make_verifier()
        )

    def make_verifier(self) -> AnswerVerifier:
        return make_test_verifier(
            self.sandbox,
            seconds=self.test_timeout_s,
            partial_credit=self.partial_credit,
            warm=self.warm_sandboxes,
        )


class CodeFileSettings(QAFileSettings):
    """Settings of env "code-file": files in the format of HumanEval or MBPP."""

    row_format = (
        '{"prompt", "entry_point", "test", "canonical_solution"} as in HumanEval, or {"text" or '
        '"prompt", "code", "test_list"} as in MBPP'
    )

    answer_format: AnswerFormatName = "code"
    correct_weight: float = 1.0
    partial_credit: bool = False
    test_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    sandbox: SandboxSettings = SandboxSettings()
    warm_sandboxes: Annotated[int, Field(ge=0)] = 2

    def parse_row(self, row: JsonRow) -> QAExample:
        return parse_row(row)

    def make_from_dataset(self, problems: QADataset) -> QATaskset:
        verifier = make_test_verifier(
            self.sandbox,
            seconds=self.test_timeout_s,
            partial_credit=self.partial_credit,
            warm=self.warm_sandboxes,
        )
        return self.make_qa_taskset("code-file", problems, verifier)
