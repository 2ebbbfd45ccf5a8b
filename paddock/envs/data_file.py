"""Environment `ask`: prompts from JSONL or Parquet, scored by the rewards that you name."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import model_validator

from paddock.envs.answer_format import AnswerFormatName
from paddock.envs.datasets import QADataset, QAExample
from paddock.envs.jsonl import JsonRow, RowError
from paddock.envs.qa import QAFileSettings, QATaskset, verify_text
from paddock.envs.rewards import FunctionReward, RewardSettingsUnion
from paddock.records import Message


class DataFileSettings(QAFileSettings):
    """A row has a prompt, a string or chat messages, and may have an answer; reward functions get
    its other columns too."""

    row_format: ClassVar[str] = '{"prompt" or "question"}, and {"answer" or "reference"} if known'

    answer_format: AnswerFormatName = "whole"
    correct_weight: float = 0.0
    prompt_column: str = ""  # "": prompt or question
    answer_column: str = ""  # "": answer or reference, if the row has one
    reward_funcs: tuple[str, ...] = ()  # "my_rewards.py:accuracy" or "package.module:accuracy"
    reward_weights: tuple[float, ...] = ()  # of reward_funcs; (): 1 each

    @model_validator(mode="after")
    def _one_weight_each(self) -> "DataFileSettings":
        if self.reward_weights and len(self.reward_weights) != len(self.reward_funcs):
            raise ValueError(
                f"reward_weights must have one entry for each of the {len(self.reward_funcs)} "
                f"reward_funcs, got {len(self.reward_weights)}"
            )
        return self

    def reward_settings(self) -> tuple[RewardSettingsUnion, ...]:
        weights = self.reward_weights or (1.0,) * len(self.reward_funcs)
        functions = (
            FunctionReward(kind="function", func=func, weight=weight)
            for func, weight in zip(self.reward_funcs, weights, strict=True)
        )
        return (*self.rewards, *functions)

    def make_from_dataset(self, dataset: QADataset) -> QATaskset:
        return self.make_qa_taskset("ask", dataset, verify_text)

    def task_shape(self) -> Mapping[str, Any]:
        chosen = {"prompt_column": self.prompt_column} if self.prompt_column else {}
        return {**super().task_shape(), **chosen}

    def parse_row(self, row: JsonRow) -> QAExample:
        prompt_name = _column(row, self.prompt_column, "prompt", "question")
        columns = {name: value for name, value in row.fields.items() if name != prompt_name}
        prompt = row.fields[prompt_name]
        before, question = _conversation(row.where, prompt_name, prompt)
        answer = ""
        if self.answer_column or not {"answer", "reference"}.isdisjoint(row.fields):
            name = _column(row, self.answer_column, "answer", "reference")
            answer = _text(row, name)
        return QAExample(
            question=question, answer=answer, before=before, columns={**columns, "prompt": prompt}
        )


def _column(row: JsonRow, chosen: str, *defaults: str) -> str:
    """The name of the first of these columns that the row has."""
    for name in (chosen,) if chosen else defaults:
        if name in row.fields:
            return name
    names = repr(chosen) if chosen else " or ".join(map(repr, defaults))
    raise RowError(f"{row.where}: {names} is missing; it has {', '.join(row.fields) or 'nothing'}")


def _text(row: JsonRow, name: str) -> str:
    """A string or a number, as text."""
    value = row.fields[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else row.get_text(name)


def _conversation(where: str, name: str, prompt: Any) -> tuple[tuple[Message, ...], str]:
    """The messages before the last one, and the text of the last, which is the user's."""
    if isinstance(prompt, str):
        return (), prompt.replace("\r\n", "\n")
    if not isinstance(prompt, list) or not prompt:
        raise RowError(f"{where}: {name!r} must be a string or a list of messages, got {prompt!r}")
    messages = [_message(f"{where}: {name!r}[{i}]", entry) for i, entry in enumerate(prompt)]
    if messages[-1].role != "user":
        raise RowError(f"{where}: the last message of {name!r} must be the user's")
    return tuple(messages[:-1]), messages[-1].content


def _message(where: str, entry: Any) -> Message:
    role, content = (
        (entry.get("role"), entry.get("content")) if isinstance(entry, dict) else (None, None)
    )
    if role not in ("system", "user", "assistant") or not isinstance(content, str):
        raise RowError(
            f"{where} must be a message with 'role' (system, user or assistant) and 'content', a "
            f"string, got {entry!r:.80}"
        )
    return Message(role=role, content=content)
