"""Environments `math` (generated) and `math-file` (GSM8K or MATH files)."""

from random import Random
from typing import Annotated, Literal

from pydantic import Field

from paddock.envs.answer_format import AnswerFormatName
from paddock.envs.datasets import GeneratedDataset, QADataset, QAExample
from paddock.envs.jsonl import JsonRow
from paddock.envs.math import generate
from paddock.envs.math.rows import parse_row
from paddock.envs.math.verifier import make_math_verifier
from paddock.envs.qa import AnswerVerifier, QAFileSettings, QASettings, QATaskset, verify_text

VerifierName = Literal["plain", "algebra"]


class MathSettings(QASettings):
    task_keys = (*QASettings.task_keys, "families", "level")

    families: tuple[generate.Family, ...] = Field(tuple(generate.FAMILIES), min_length=1)
    level: Annotated[int, Field(ge=1, le=generate.LEVELS)] = 2

    def make_taskset(self) -> QATaskset:
        def draw(rng: Random) -> QAExample:
            return generate.generate_example(rng, self.families, self.level)

        return self.make_qa_taskset("math", GeneratedDataset(draw, seed=self.seed), verify_text)


class MathFileSettings(QAFileSettings):
    """Files in the format of GSM8K or MATH."""

    row_format = (
        '{"question", "answer": "... #### 72"} as in GSM8K, or {"problem", and "solution" with a '
        '\\boxed answer or "answer"} as in MATH'
    )

    answer_format: AnswerFormatName = "boxed"
    correct_weight: float = 1.0
    verifier: VerifierName = "algebra"  # plain: compares numbers and text, needs no extra package
    num_workers: Annotated[int, Field(ge=1)] = 1  # processes for algebra
    verifier_timeout_s: Annotated[float, Field(gt=0)] = 10.0

    def parse_row(self, row: JsonRow) -> QAExample | None:
        return parse_row(row)

    def make_from_dataset(self, dataset: QADataset) -> QATaskset:
        return self.make_qa_taskset("math-file", dataset, self._verifier())

    def _verifier(self) -> AnswerVerifier:
        if self.verifier == "plain":
            return verify_text
        return make_math_verifier(count=self.num_workers, seconds=self.verifier_timeout_s)
