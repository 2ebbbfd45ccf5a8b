"""Pass rates of tasks: how often a model solves each, and a file of the tasks in a range."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paddock.launch.dialogue_file import OutcomeLog
from paddock.launch.model_client import ModelClient
from paddock.records import ToolSpec, Verdict

if TYPE_CHECKING:
    from paddock.envs import RolloutTrace, Taskset


@dataclass(frozen=True, slots=True)
class SampledRollout:
    """One completion of a task."""

    name: str
    k: int  # of the task's completions, from 0
    seed: int
    trace: "RolloutTrace"
    tools: tuple[ToolSpec, ...]


@dataclass(slots=True)
class PassRates:
    """The completions of every task that passed, by one model or by a stronger one too."""

    log: OutcomeLog
    taskset: "Taskset"
    split: Literal["train", "test"]
    n: int
    min_reward: float
    wanted: tuple[float, float]  # lowest and highest pass rate
    stronger: str = ""  # name of the stronger model, while and after it is sampled
    counts: Counter[str] = field(default_factory=Counter)  # of completions sampled now

    def has(self, sample_id: str) -> bool:
        return self._key(sample_id) in self.log.fates

    def record(self, rollout: SampledRollout, client: ModelClient) -> None:  # noqa: ARG002
        outcome = rollout.trace.outcome
        fate, reward = "failed", None
        if isinstance(outcome, Verdict):
            reward = outcome.reward
            fate = "passed" if reward >= self.min_reward else "not passed"
        elif outcome.is_policy_failure:
            fate = "policy failure"
        if fate != "failed":  # else it is sampled again when the command is run again
            self.log.note(self._key(rollout.name), fate, reward)
        self.counts[fate] += 1

    def in_range(self, tasks: Iterable[int]) -> list[int]:
        """The tasks whose pass rate is known and in the range that is wanted."""
        return [index for index in tasks if self._verdict(index) == "kept"]

    def write(self, out: Path, tasks: Iterable[int]) -> Counter[str]:
        """Write the tasks to keep, each as a row of a data file with its pass rate; the number of
        tasks kept, too easy, and so on."""
        verdicts = {index: self._verdict(index) for index in tasks}
        if self.stronger:
            for index in self.in_range(tasks):
                rate = self._rate(index, self.stronger)
                verdicts[index] = (
                    "incomplete" if rate is None else "kept" if rate else "not solved by either"
                )
        rows = [self._row(index) for index, verdict in verdicts.items() if verdict == "kept"]
        draft = out.with_name(f"{out.name}.draft")
        draft.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        os.replace(draft, out)  # atomic: a run may be reading it
        return Counter(verdicts.values()) + Counter(failed=self.counts["failed"])

    def _verdict(self, index: int) -> str:
        low, high = self.wanted
        rate = self._rate(index)
        if rate is None:
            return "incomplete"
        return "too hard" if rate < low else "too easy" if rate > high else "kept"

    def _rate(self, index: int, model: str = "") -> float | None:
        """The share of a task's completions that passed; None unless all are known."""
        task = self.taskset.task(index, self.split).id
        fates = [self.log.fates.get(_key(f"{task}#{k}", model)) for k in range(self.n)]
        return None if None in fates else fates.count("passed") / self.n

    def _row(self, index: int) -> dict[str, Any]:
        task = self.taskset.task(index, self.split)
        row: Mapping[str, Any] = {"prompt": task.messages[-1].content}
        if hasattr(self.taskset, "row"):
            row = self.taskset.row(task)
        rates = {"pass_rate": self._rate(index)}
        if self.stronger:
            rates["stronger_pass_rate"] = self._rate(index, self.stronger)
        return {**row, **rates, "task_id": task.id, "task_index": index}

    def _key(self, sample_id: str) -> str:
        return _key(sample_id, self.stronger)


def _key(sample_id: str, stronger: str) -> str:
    """Name of a completion in the log."""
    return f"{sample_id} by {stronger}" if stronger else sample_id
