"""Worlds that ask a question and look at the answer: mathematics, logic, anything with a reference.

A world here is a source of problems, a form in which answers are given, and a check. Everything
else, other parts of the reward and tools included, is the same for all of them.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field

from paddock.config import RequiredFile
from paddock.envs.answer_format import ANSWER_FORMATS, AnswerFormat, AnswerFormatName, answers_match
from paddock.envs.chat_env import ChatEnv, ToolsFactory
from paddock.envs.datasets import ListDataset, QADataset, QAExample
from paddock.envs.env import Policy, Split, scripted_policy
from paddock.envs.jsonl import JsonRow, RowError, read_rows
from paddock.envs.python_tool import PythonToolSettings, make_python_tool
from paddock.envs.registry import EnvError, EnvSettings
from paddock.envs.rewards import (
    RewardScore,
    RewardSettingsUnion,
    Submission,
    WeightedReward,
    combine_rewards,
)
from paddock.envs.tools import Tool
from paddock.records import Budget, Message, Task, Verdict

AnswerVerifier = Callable[
    [str, QAExample], Awaitable[RewardScore]
]  # an answer against the problem it answers


class QASettings(EnvSettings):
    """What every world of questions can be told."""

    task_keys: ClassVar[tuple[str, ...]] = ("seed", "answer_format")

    seed: int = 0
    answer_format: AnswerFormatName = "boxed"
    max_turns: Annotated[int, Field(ge=1)] = 1
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    correct_weight: float = 1.0  # weight of being right
    format_weight: float = 0.0  # weight of giving an answer in the form at all
    rewards: tuple[RewardSettingsUnion, ...] = ()  # further parts of the reward
    python_tool: PythonToolSettings | None = None  # a Python tool to reason with; none if left out

    def data_files(self) -> tuple[RequiredFile, ...]:
        return tuple(file for part in self.rewards for file in part.data_files())

    def make_without_data(self) -> "QATaskset":
        return self.without_calibration().make_taskset()  # type: ignore[return-value]

    def without_calibration(self) -> Self:
        """The same with rewards that ask about no anchors."""
        return self.model_copy(update={"rewards": tuple(map(_uncalibrated, self.rewards))})

    def make_qa_taskset(
        self, name: str, problems: QADataset, check: AnswerVerifier, *, tools: tuple[Tool, ...] = ()
    ) -> "QATaskset":
        if (tools or self.python_tool) and self.max_turns < 2:
            raise EnvError(f"with tools there must be more than {self.max_turns} turns")
        also = tuple(part.make_reward() for part in self.rewards)
        names = ["correct", "formed", *(part.name for part in also)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise EnvError(f"also: two parts are called {twice[0]!r}; give one another 'name'")
        return QATaskset(
            name=name,
            label=self.shape_hash,
            problems=problems,
            form=ANSWER_FORMATS[self.answer_format],
            check=check,
            weights={"correct": self.correct_weight, "formed": self.format_weight},
            also=also,
            limits=Budget(turns=self.max_turns, seconds=self.timeout_s, output_bytes=20_000),
            tools=tools,
            lend=make_python_tool(self.python_tool) if self.python_tool else None,
        )


def _uncalibrated(part: RewardSettingsUnion) -> RewardSettingsUnion:
    return (
        part.model_copy(update={"calibration_file": ""})
        if hasattr(part, "calibration_file")
        else part
    )


@dataclass(frozen=True, kw_only=True)
class QATaskset:
    """A world of questions. The verdict's parts: `correct` is what the check says (0 where no
    answer was found), `formed` is whether one was found, then whatever else was asked for."""

    name: str
    label: str
    problems: QADataset
    form: AnswerFormat
    check: AnswerVerifier
    weights: Mapping[str, float]
    also: tuple[WeightedReward, ...]
    limits: Budget
    tools: tuple[Tool, ...] = ()  # that need no set-up
    lend: ToolsFactory | None = None  # those that do

    def size(self, split: Split) -> int | None:
        return self.problems.size(split)

    def task(self, index: int, split: Split = "train") -> Task:
        row = self.problems.row_index(split, index)
        problem = self.problems.example(split, row)
        ask = Message(role="user", content=f"{problem.question}\n\n{self.form.hint}".strip())
        return Task(
            id=f"{self.name}/{self.label}/{split}/{row}",
            env=self.name,
            messages=(ask,),
            budget=self.limits,
        )

    def example_of(self, task: Task) -> QAExample:
        """What belongs to a task, by its id."""
        split, row = parse_task_id(task, self.name, self.label)
        return self.problems.example(split, row)

    def make_env(self, task: Task) -> ChatEnv:
        problem = self.example_of(task)

        async def grade(messages: tuple[Message, ...]) -> Verdict:
            return await self.score(problem, messages)

        return ChatEnv(task, grade, tools=self.tools, lend=self.lend)

    def solver(self, task: Task) -> Policy:
        answer = self.example_of(task).answer
        if not answer:
            raise EnvError(f"task {task.id!r}: no solution is known")
        return self.scripted_answer(answer)

    def scripted_answer(self, answer: str) -> Policy:
        """A player that gives this answer, in the form that is asked for."""
        return scripted_policy(Message(role="assistant", content=self.form.render(answer)))

    async def score(self, problem: QAExample, messages: tuple[Message, ...]) -> Verdict:
        work = Submission(messages=messages, reference=problem.answer)
        work = replace(work, answer=self.form.extract(work.reply))

        async def correct(work: Submission) -> RewardScore:
            if not work.answer:
                return RewardScore(0.0)
            score = await self.check(work.answer, problem)
            return replace(score, value=min(1.0, max(0.0, score.value)))

        async def formed(work: Submission) -> RewardScore:
            return RewardScore(
                float(bool(work.answer)), "" if work.answer else "no answer was found"
            )

        own = {"correct": correct, "formed": formed}
        parts = [WeightedReward(name=n, scorer=s, weight=self.weights[n]) for n, s in own.items()]
        return await combine_rewards([*parts, *self.also], work)


def parse_task_id(task: Task, name: str, label: str) -> tuple[Split, int]:
    """The split and the row that a task's id names; WorldError if another world made it."""
    world, _, rest = task.id.partition("/")
    made, _, rest = rest.partition("/")
    split, _, row = rest.partition("/")
    if (world, made) != (name, label) or split not in ("train", "test") or not row.isdecimal():
        raise EnvError(f"task {task.id!r} was not made by world {name!r} with these settings")
    return "test" if split == "test" else "train", int(row)


async def verify_text(answer: str, problem: QAExample) -> RewardScore:
    """Right if both are plainly the same number or the same letters."""
    return RewardScore(float(answers_match(answer, problem.answer) is True))


class QAFileSettings(QASettings):
    """Questions of a file, graded by the parts that are asked for: rules, a model, a judge."""

    row_format: ClassVar[str] = '{"question" or "prompt"}, and {"answer" or "reference"} if known'

    answer_format: AnswerFormatName = "whole"
    train_file: str = ""  # JSONL or JSON, .gz or not, with rows of `row_format`
    test_file: str = ""
    correct_weight: float = 0.0

    def make_taskset(self) -> QATaskset:
        self.validate_args()
        return self.make_from_dataset(self.load_dataset())

    def validate_args(self) -> None:
        """Refuse settings that cannot be meant, before any file is read."""
        if not (self.correct_weight or self.format_weight or self.rewards):
            raise EnvError("say with 'also' what an answer is worth, or with 'correct' or 'formed'")
        if not (self.train_file or self.test_file):
            raise EnvError("name a file of problems with 'train' or 'test'")

    def parse_row(self, row: JsonRow) -> QAExample | None:
        """What a row says; None: it is left out."""
        return parse_qa_row(row)

    def make_from_dataset(self, problems: QADataset) -> QATaskset:
        """The world of these problems."""
        return self.make_qa_taskset("ask", problems, verify_text)

    def make_without_data(self) -> QATaskset:
        self.validate_args()
        return self.without_calibration().make_from_dataset(ListDataset([], []))

    def data_files(self) -> tuple[RequiredFile, ...]:
        contains = f"JSONL or a JSON list, .gz or not, a problem a row: {self.row_format}"
        own = (
            RequiredFile(path=path, contains=contains)
            for path in (self.train_file, self.test_file)
            if path
        )
        return (*own, *super().data_files())

    def task_shape(self) -> Mapping[str, Any]:
        # A file may lie elsewhere tomorrow and still be the same.
        names = {"train": Path(self.train_file).name, "test": Path(self.test_file).name}
        return {**super().task_shape(), **names}

    def load_dataset(self) -> ListDataset:
        """The problems of both files."""
        files = (self.train_file, self.test_file)
        train, test = (_read(path, self.parse_row) if path else [] for path in files)
        return ListDataset(train, test, seed=self.seed)


def _read(path: str, read: Callable[[JsonRow], QAExample | None]) -> list[QAExample]:
    found = [problem for row in read_rows(path) if (problem := read(row))]
    if not found:
        raise RowError(f"{path}: there is no problem in it")
    return found


def parse_qa_row(row: JsonRow) -> QAExample:
    """A question of a file, with its answer where it has one."""
    known = not {"answer", "reference"}.isdisjoint(row.fields)
    return QAExample(
        question=row.get_text("question", "prompt"),
        answer=row.get_text("answer", "reference") if known else "",
    )
