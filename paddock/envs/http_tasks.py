"""Tasks for agents elsewhere: rows of a file, or numbers alone.

The agent gets every field of a row except its answer. Its last reply is compared with the answer;
rows without one are scored from elsewhere (`tasks.NAME.agent.reward_url` or `posted_verdict`).
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from paddock.config import RequiredFile
from paddock.envs.answer_format import ANSWER_FORMATS, AnswerFormatName, answers_match
from paddock.envs.chat_env import ChatEnv
from paddock.envs.datasets import ListDataset, QAExample
from paddock.envs.env import RolloutFailed, Split
from paddock.envs.jsonl import JsonRow, RowError, read_rows
from paddock.envs.registry import EnvSettings
from paddock.records import Budget, Message, Task, Verdict

_ANSWERS = ("answer", "reference")  # fields that only the verifier sees


class HttpTaskSettings(EnvSettings):
    """Tasks for agents elsewhere."""

    task_keys: ClassVar[tuple[str, ...]] = ("seed", "answer_format")

    tasks: str = ""  # JSONL or JSON: {"id", "prompt", "answer"} and what else the agent needs
    answer_format: AnswerFormatName = "whole"
    seed: int = 0  # of the order in later epochs
    timeout_s: Annotated[float, Field(gt=0)] = 3600.0

    def data_files(self) -> tuple[RequiredFile, ...]:
        contains = 'JSONL or a JSON list, .gz or not: {"id", "prompt", "answer"}'
        return (RequiredFile(path=self.tasks, contains=contains),) if self.tasks else ()

    def make_taskset(self) -> "HttpTaskset":
        return HttpTaskset(self, list(read_rows(self.tasks)) if self.tasks else [])

    def make_without_data(self) -> "HttpTaskset":
        return HttpTaskset(self, [])


class HttpTaskset:
    name = "http"

    def __init__(self, settings: HttpTaskSettings, rows: list[JsonRow]) -> None:
        self._settings, self._rows = settings, {_id_of(row, i): row for i, row in enumerate(rows)}
        if len(self._rows) < len(rows):
            raise RowError(f"{settings.tasks}: the 'id' of every row must be its own")
        examples = [
            QAExample(question=row.get_text("prompt", "question"), answer="") for row in rows
        ]
        self._order = ListDataset(examples, [], seed=settings.seed)
        self._budget = Budget(turns=1 << 20, seconds=settings.timeout_s, output_bytes=1 << 20)

    def size(self, split: Split) -> int | None:
        return self._order.size(split) if self._settings.tasks else None

    def task(self, index: int, split: Split = "train") -> Task:
        prompt, id = str(index), str(index)
        if self._settings.tasks:
            id, row = list(self._rows.items())[self._order.row_index(split, index)]
            prompt = row.get_text("prompt", "question")
        return Task(
            id=f"http/{self._settings.shape_hash}/{split}/{id}",
            env="http",
            messages=(Message(role="user", content=prompt),),
            budget=self._budget,
        )

    def details(self, task: Task) -> Mapping[str, Any]:
        """The fields of a task's row that its agent may see."""
        row = self._row(task)
        return {} if row is None else {k: v for k, v in row.fields.items() if k not in _ANSWERS}

    def row(self, task: Task) -> Mapping[str, Any]:
        """The task as a row of a data file."""
        row = self._row(task)
        return {} if row is None else row.fields

    def make_env(self, task: Task) -> ChatEnv:
        async def score(messages: tuple[Message, ...]) -> Verdict:
            row = self._row(task)
            if row is None or not set(_ANSWERS) & set(row.fields):
                what = "there is no answer to compare with: set 'reward_url' or 'posted_verdict'"
                raise RolloutFailed("grader", "answer", what)
            extract = ANSWER_FORMATS[self._settings.answer_format].extract
            found = extract(messages[-1].content) or ""
            matches = answers_match(found, row.get_text(*_ANSWERS)) is True
            return Verdict(reward=float(bool(found) and matches))

        return ChatEnv(task, score)

    def _row(self, task: Task) -> JsonRow | None:
        return self._rows.get(task.id.split("/", 3)[3])


def _id_of(row: JsonRow, index: int) -> str:
    return str(row.fields.get("id", index))
