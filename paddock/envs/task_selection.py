"""Some tasks of an environment: its first ones, or those that `paddock sample --pass-rate` kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paddock.envs.env import Env, Split, Taskset
from paddock.envs.jsonl import RowError, read_rows
from paddock.records import Task


@dataclass(frozen=True, slots=True)
class SelectedTaskset:
    """The train tasks of an environment at these indices, over and over in this order."""

    taskset: Taskset
    indices: Sequence[int]

    @property
    def name(self) -> str:
        return self.taskset.name

    def size(self, split: Split) -> int | None:
        return len(self.indices) if split == "train" else self.taskset.size(split)

    def task(self, index: int, split: Split = "train") -> Task:
        if split == "train":
            index = self.indices[index % len(self.indices)]
        return self.taskset.task(index, split)

    def make_env(self, task: Task) -> Env:
        return self.taskset.make_env(task)

    def __getattr__(self, name: str) -> Any:
        """What only some environments have, such as `details` of a task."""
        return getattr(self.taskset, name)


def read_task_indices(path: str, taskset: Taskset) -> list[int]:
    """The indices of a task file. RowError: it is of another environment or of other settings."""
    indices = []
    for row in read_rows(path):
        index, id = row.fields.get("task_index"), row.fields.get("task_id")
        if not isinstance(index, int) or index < 0:
            raise RowError(f"{row.where}: 'task_index' is missing: not a file of `paddock sample`")
        if taskset.task(index).id != id:
            raise RowError(
                f"{row.where}: task {index} of environment {taskset.name!r} is"
                f" {taskset.task(index).id!r}, not {id!r}: it was sampled with other settings"
            )
        indices.append(index)
    if not indices:
        raise RowError(f"{path} has no tasks")
    return indices
