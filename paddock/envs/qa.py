"""Question-answering environments: one question, an answer format and a verifier.

An environment here is a dataset, an answer format and a verifier. Further rewards and tools are
common to all of them.
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
from paddock.envs.mcp_server import McpServerSettings, open_mcp_servers
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

# Scores an extracted answer against its example.
AnswerVerifier = Callable[[str, QAExample], Awaitable[RewardScore]]


class QASettings(EnvSettings):
    """Settings of every question-answering environment."""

    task_keys: ClassVar[tuple[str, ...]] = ("seed", "answer_format")

    seed: int = 0
    answer_format: AnswerFormatName = "boxed"
    max_turns: Annotated[int, Field(ge=1)] = 1
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    correct_weight: float = 1.0  # weight of a correct answer
    format_weight: float = 0.0  # weight of an answer in the required format
    rewards: tuple[RewardSettingsUnion, ...] = ()  # further rewards
    python_tool: PythonToolSettings | None = None  # None: no Python tool
    mcp_servers: dict[str, McpServerSettings] = Field(default_factory=dict)  # whose tools to offer

    def data_files(self) -> tuple[RequiredFile, ...]:
        return tuple(file for part in self.reward_settings() for file in part.data_files())

    def reward_settings(self) -> tuple[RewardSettingsUnion, ...]:
        """All further rewards."""
        return self.rewards

    def make_without_data(self) -> "QATaskset":
        return self.without_calibration().make_taskset()  # type: ignore[return-value]

    def without_calibration(self) -> Self:
        """These settings with rewards that skip calibration."""
        return self.model_copy(update={"rewards": tuple(map(_without_calibration, self.rewards))})

    def make_qa_taskset(
        self, name: str, dataset: QADataset, verify: AnswerVerifier, *, tools: tuple[Tool, ...] = ()
    ) -> "QATaskset":
        if (tools or self.python_tool or self.mcp_servers) and self.max_turns < 2:
            raise EnvError(f"max_turns must be at least 2 with tools, got {self.max_turns}")
        rewards = tuple(part.make_reward() for part in self.reward_settings())
        names = ["correct", "formed", *(reward.name for reward in rewards)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise EnvError(f"rewards: the name {twice[0]!r} is used twice; set 'name' of one")
        return QATaskset(
            name=name,
            shape_hash=self.shape_hash,
            dataset=dataset,
            answer_format=ANSWER_FORMATS[self.answer_format],
            verify=verify,
            weights={"correct": self.correct_weight, "formed": self.format_weight},
            rewards=rewards,
            budget=Budget(turns=self.max_turns, seconds=self.timeout_s, output_bytes=20_000),
            tools=tools,
            factories=self._tools_factories(),
        )

    def _tools_factories(self) -> tuple[ToolsFactory, ...]:
        python = (make_python_tool(self.python_tool),) if self.python_tool else ()
        return (*python, open_mcp_servers(self.mcp_servers)) if self.mcp_servers else python


def _without_calibration(part: RewardSettingsUnion) -> RewardSettingsUnion:
    return (
        part.model_copy(update={"calibration_file": ""})
        if hasattr(part, "calibration_file")
        else part
    )


@dataclass(frozen=True, kw_only=True)
class QATaskset:
    """A question-answering environment. Parts of the verdict: `correct` is the verifier's score (0
    if no answer was found), `formed` is 1 if an answer was found, then the further rewards."""

    name: str
    shape_hash: str
    dataset: QADataset
    answer_format: AnswerFormat
    verify: AnswerVerifier
    weights: Mapping[str, float]
    rewards: tuple[WeightedReward, ...]
    budget: Budget
    tools: tuple[Tool, ...] = ()  # without setup
    factories: tuple[ToolsFactory, ...] = ()  # of tools with setup per rollout

    def size(self, split: Split) -> int | None:
        return self.dataset.size(split)

    def task(self, index: int, split: Split = "train") -> Task:
        row = self.dataset.row_index(split, index)
        example = self.dataset.example(split, row)
        content = f"{example.question}\n\n{self.answer_format.hint}".strip()
        return Task(
            id=f"{self.name}/{self.shape_hash}/{split}/{row}",
            env=self.name,
            messages=(*example.before, Message(role="user", content=content)),
            budget=self.budget,
        )

    def example_of(self, task: Task) -> QAExample:
        """The example of a task, by task id."""
        split, row = parse_task_id(task, self.name, self.shape_hash)
        return self.dataset.example(split, row)

    def row(self, task: Task) -> Mapping[str, Any]:
        """The task as a row of a data file: that of its own file, or one for `ask`."""
        example = self.example_of(task)
        return example.row or {"prompt": task.messages[-1].content, "answer": example.answer}

    def make_env(self, task: Task) -> ChatEnv:
        example = self.example_of(task)

        async def score(messages: tuple[Message, ...]) -> Verdict:
            return await self.score(example, messages)

        return ChatEnv(task, score, tools=self.tools, factories=self.factories)

    def solver(self, task: Task) -> Policy:
        answer = self.example_of(task).answer
        if not answer:
            raise EnvError(f"task {task.id!r} has no known solution")
        return self.scripted_answer(answer)

    def scripted_answer(self, answer: str) -> Policy:
        """A policy that gives this answer in the required format."""
        return scripted_policy(Message(role="assistant", content=self.answer_format.render(answer)))

    async def score(self, example: QAExample, messages: tuple[Message, ...]) -> Verdict:
        submission = Submission(
            messages=messages,
            reference=example.answer,
            prompt_length=len(example.before) + 1,
            columns=example.columns or {"prompt": example.question, "answer": example.answer},
        )
        submission = replace(submission, answer=self.answer_format.extract(submission.reply))

        async def correct(submission: Submission) -> RewardScore:
            if not submission.answer:
                return RewardScore(0.0)
            score = await self.verify(submission.answer, example)
            return replace(score, value=min(1.0, max(0.0, score.value)))

        async def formed(submission: Submission) -> RewardScore:
            found = bool(submission.answer)
            return RewardScore(float(found), "" if found else "no answer was found")

        own = {"correct": correct, "formed": formed}
        parts = [WeightedReward(name=n, func=f, weight=self.weights[n]) for n, f in own.items()]
        return await combine_rewards([*parts, *self.rewards], submission)


def parse_task_id(task: Task, name: str, shape_hash: str) -> tuple[Split, int]:
    """Split and row of a task id; EnvError if another environment made the task."""
    env, _, rest = task.id.partition("/")
    shape, _, rest = rest.partition("/")
    split, _, row = rest.partition("/")
    valid = split in ("train", "test") and row.isdecimal()
    if (env, shape) != (name, shape_hash) or not valid:
        raise EnvError(f"task {task.id!r} was not made by environment {name!r} with these settings")
    return "test" if split == "test" else "train", int(row)


async def verify_text(answer: str, example: QAExample) -> RewardScore:
    """Reward 1 if both are the same number or, normalized, the same text."""
    return RewardScore(float(answers_match(answer, example.answer) is True))


class QAFileSettings(QASettings):
    """Questions from files of rows."""

    row_format: ClassVar[str] = '{"question" or "prompt"}, and {"answer" or "reference"} if known'

    answer_format: AnswerFormatName = "whole"
    train_file: str = ""  # JSONL or JSON, .gz or not, or Parquet, with rows of `row_format`
    test_file: str = ""
    correct_weight: float = 0.0

    def make_taskset(self) -> QATaskset:
        self.validate_args()
        return self.make_from_dataset(self.load_dataset())

    def validate_args(self) -> None:
        """Raise EnvError for inconsistent settings, before any file is read."""
        if not (self.correct_weight or self.format_weight or self.reward_settings()):
            raise EnvError(
                "the environment needs a reward: set 'rewards', for example [{kind = \"exact\"}], "
                "or 'correct_weight' or 'format_weight'"
            )
        if not (self.train_file or self.test_file):
            raise EnvError("set 'train_file' or 'test_file'")

    def parse_row(self, row: JsonRow) -> QAExample | None:
        """The example of a row; None: skip the row."""
        known = not {"answer", "reference"}.isdisjoint(row.fields)
        return QAExample(
            question=row.get_text("question", "prompt"),
            answer=row.get_text("answer", "reference") if known else "",
        )

    def make_from_dataset(self, dataset: QADataset) -> QATaskset:
        """The environment over this dataset."""
        raise NotImplementedError

    def make_without_data(self) -> QATaskset:
        self.validate_args()
        return self.without_calibration().make_from_dataset(ListDataset([], []))

    def data_files(self) -> tuple[RequiredFile, ...]:
        kinds = "JSONL or a JSON list, .gz or not, or Parquet"
        contains = f"{kinds}, one example per row: {self.row_format}"
        own = (
            RequiredFile(path=path, contains=contains)
            for path in (self.train_file, self.test_file)
            if path
        )
        return (*own, *super().data_files())

    def task_shape(self) -> Mapping[str, Any]:
        # By name, since a file may be moved.
        names = {"train": Path(self.train_file).name, "test": Path(self.test_file).name}
        return {**super().task_shape(), **names}

    def load_dataset(self) -> ListDataset:
        """The examples of both files."""
        files = (self.train_file, self.test_file)
        train, test = (_read(path, self.parse_row) if path else [] for path in files)
        return ListDataset(train, test, seed=self.seed)


def _read(path: str, parse: Callable[[JsonRow], QAExample | None]) -> list[QAExample]:
    found = [replace(example, row=row.fields) for row in read_rows(path) if (example := parse(row))]
    if not found:
        raise RowError(f"{path} has no examples")
    return found
