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
from paddock.envs.answers import FORMS, Form, FormName, same
from paddock.envs.problems import Listed, Problem, Problems
from paddock.envs.python import PythonSettings, lending_python
from paddock.envs.registry import WorldError, WorldSettings
from paddock.envs.rewards import Part, PartSettings, Score, Submission, verdict
from paddock.envs.rows import Row, RowError, rows
from paddock.envs.talk import Lend, Talk
from paddock.envs.tools import Tool
from paddock.envs.world import Policy, Split, scripted
from paddock.records import Budget, Message, Task, Verdict

Check = Callable[[str, Problem], Awaitable[Score]]  # an answer against the problem it answers


class AskSettings(WorldSettings):
    """What every world of questions can be told."""

    shaped_by: ClassVar[tuple[str, ...]] = ("seed", "form")

    seed: int = 0
    form: FormName = "boxed"
    turns: Annotated[int, Field(ge=1)] = 1
    seconds: Annotated[float, Field(gt=0)] = 600.0
    correct: float = 1.0  # weight of being right
    formed: float = 0.0  # weight of giving an answer in the form at all
    also: tuple[PartSettings, ...] = ()  # further parts of the reward
    python: PythonSettings | None = None  # a Python tool to reason with; none if left out

    def data_files(self) -> tuple[RequiredFile, ...]:
        return tuple(file for part in self.also for file in part.data_files())

    def open_without_data(self) -> "AskWorld":
        return self.uncalibrated().world()  # type: ignore[return-value]

    def uncalibrated(self) -> Self:
        """The same with rewards that ask about no anchors."""
        return self.model_copy(update={"also": tuple(map(_uncalibrated, self.also))})

    def asking(
        self, name: str, problems: Problems, check: Check, *, tools: tuple[Tool, ...] = ()
    ) -> "AskWorld":
        if (tools or self.python) and self.turns < 2:
            raise WorldError(f"with tools there must be more than {self.turns} turns")
        also = tuple(part.part() for part in self.also)
        names = ["correct", "formed", *(part.name for part in also)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise WorldError(f"also: two parts are called {twice[0]!r}; give one another 'name'")
        return AskWorld(
            name=name,
            label=self.label,
            problems=problems,
            form=FORMS[self.form],
            check=check,
            weights={"correct": self.correct, "formed": self.formed},
            also=also,
            limits=Budget(turns=self.turns, seconds=self.seconds, output_bytes=20_000),
            tools=tools,
            lend=lending_python(self.python) if self.python else None,
        )


def _uncalibrated(part: PartSettings) -> PartSettings:
    return part.model_copy(update={"anchors": ""}) if hasattr(part, "anchors") else part


@dataclass(frozen=True, kw_only=True)
class AskWorld:
    """A world of questions. The verdict's parts: `correct` is what the check says (0 where no
    answer was found), `formed` is whether one was found, then whatever else was asked for."""

    name: str
    label: str
    problems: Problems
    form: Form
    check: Check
    weights: Mapping[str, float]
    also: tuple[Part, ...]
    limits: Budget
    tools: tuple[Tool, ...] = ()  # that need no set-up
    lend: Lend | None = None  # those that do

    def size(self, split: Split) -> int | None:
        return self.problems.size(split)

    def task(self, index: int, split: Split = "train") -> Task:
        row = self.problems.row(split, index)
        problem = self.problems.at(split, row)
        ask = Message(role="user", content=f"{problem.question}\n\n{self.form.hint}".strip())
        return Task(
            id=f"{self.name}/{self.label}/{split}/{row}",
            env=self.name,
            messages=(ask,),
            budget=self.limits,
        )

    def problem(self, task: Task) -> Problem:
        """What belongs to a task, by its id."""
        split, row = place(task, self.name, self.label)
        return self.problems.at(split, row)

    def open(self, task: Task) -> Talk:
        problem = self.problem(task)

        async def grade(messages: tuple[Message, ...]) -> Verdict:
            return await self.grade(problem, messages)

        return Talk(task, grade, tools=self.tools, lend=self.lend)

    def solver(self, task: Task) -> Policy:
        answer = self.problem(task).answer
        if not answer:
            raise WorldError(f"task {task.id!r}: no solution is known")
        return self.saying(answer)

    def saying(self, answer: str) -> Policy:
        """A player that gives this answer, in the form that is asked for."""
        return scripted(Message(role="assistant", content=self.form.say(answer)))

    async def grade(self, problem: Problem, messages: tuple[Message, ...]) -> Verdict:
        work = Submission(messages=messages, reference=problem.answer)
        work = replace(work, answer=self.form.find(work.reply))

        async def correct(work: Submission) -> Score:
            if not work.answer:
                return Score(0.0)
            score = await self.check(work.answer, problem)
            return replace(score, value=min(1.0, max(0.0, score.value)))

        async def formed(work: Submission) -> Score:
            return Score(float(bool(work.answer)), "" if work.answer else "no answer was found")

        own = {"correct": correct, "formed": formed}
        parts = [Part(name=n, scorer=s, weight=self.weights[n]) for n, s in own.items()]
        return await verdict([*parts, *self.also], work)


def place(task: Task, name: str, label: str) -> tuple[Split, int]:
    """The split and the row that a task's id names; WorldError if another world made it."""
    world, _, rest = task.id.partition("/")
    made, _, rest = rest.partition("/")
    split, _, row = rest.partition("/")
    if (world, made) != (name, label) or split not in ("train", "test") or not row.isdecimal():
        raise WorldError(f"task {task.id!r} was not made by world {name!r} with these settings")
    return "test" if split == "test" else "train", int(row)


async def by_plain_text(answer: str, problem: Problem) -> Score:
    """Right if both are plainly the same number or the same letters."""
    return Score(float(same(answer, problem.answer) is True))


class FileSettings(AskSettings):
    """Questions of a file, graded by the parts that are asked for: rules, a model, a judge."""

    row_format: ClassVar[str] = '{"question" or "prompt"}, and {"answer" or "reference"} if known'

    form: FormName = "whole"
    train: str = ""  # JSONL or JSON, .gz or not, with rows of `row_format`
    test: str = ""
    correct: float = 0.0

    def world(self) -> AskWorld:
        self.check()
        return self.over(self.listed())

    def check(self) -> None:
        """Refuse settings that cannot be meant, before any file is read."""
        if not (self.correct or self.formed or self.also):
            raise WorldError(
                "say with 'also' what an answer is worth, or with 'correct' or 'formed'"
            )
        if not (self.train or self.test):
            raise WorldError("name a file of problems with 'train' or 'test'")

    def problem(self, row: Row) -> Problem | None:
        """What a row says; None: it is left out."""
        return question_of(row)

    def over(self, problems: Problems) -> AskWorld:
        """The world of these problems."""
        return self.asking("ask", problems, by_plain_text)

    def open_without_data(self) -> AskWorld:
        self.check()
        return self.uncalibrated().over(Listed([], []))

    def data_files(self) -> tuple[RequiredFile, ...]:
        contains = f"JSONL or a JSON list, .gz or not, a problem a row: {self.row_format}"
        own = (
            RequiredFile(path=path, contains=contains) for path in (self.train, self.test) if path
        )
        return (*own, *super().data_files())

    def shape(self) -> Mapping[str, Any]:
        # A file may lie elsewhere tomorrow and still be the same.
        names = {"train": Path(self.train).name, "test": Path(self.test).name}
        return {**super().shape(), **names}

    def listed(self) -> Listed:
        """The problems of both files."""
        files = (self.train, self.test)
        train, test = (_read(path, self.problem) if path else [] for path in files)
        return Listed(train, test, seed=self.seed)


def _read(path: str, read: Callable[[Row], Problem | None]) -> list[Problem]:
    found = [problem for row in rows(path) if (problem := read(row))]
    if not found:
        raise RowError(f"{path}: there is no problem in it")
    return found


def question_of(row: Row) -> Problem:
    """A question of a file, with its answer where it has one."""
    known = not {"answer", "reference"}.isdisjoint(row.fields)
    return Problem(
        question=row.text("question", "prompt"),
        answer=row.text("answer", "reference") if known else "",
    )
