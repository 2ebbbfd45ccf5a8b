"""The shares of tasks over time: as asked for, less the tasks that are set aside.

Every change is in the ledger, with the update from which on it holds, so that a run that is taken
back to a checkpoint mixes its tasks as before.
"""

from collections.abc import Collection, Mapping
from math import isfinite

from paddock.journal import Ledger, TaskWeights
from paddock.rollout.task_health import RunAbortedError


class TaskRatioError(ValueError):
    """Ratios that no run could hold."""


class TaskMixture:
    def __init__(self, ledger: Ledger, ratios: Mapping[str, float]) -> None:
        """`ratios` are the recipe's: those of an earlier call with the same recipe still hold,
        with every change that was asked for since."""
        self._ledger = ledger
        self._tasks = tuple(ratios)
        self._recipe = validate_ratios(ratios, ratios)
        self._rows: list[TaskWeights] = []

    def resume(self, update: int) -> None:
        """Read the ledger as it is now, `update` being the next one."""
        self._rows = self._ledger.task_weights()
        if self._ledger.get_metadata("ratios") != self._recipe:
            self._ledger.set_metadata("ratios", self._recipe)
            self._write(
                TaskWeights(since=update, weights=self._recipe, why="recipe", asked=True), update
            )

    def request_ratios(self, ratios: Mapping[str, float], *, since: int, now: int) -> None:
        """Other shares, from the batch on that begins with update `since`."""
        asked = validate_ratios(ratios, self._tasks)
        self._write(TaskWeights(since=since, weights=asked, why="asked", asked=True), now)

    def disable(self, task: str, why: str, *, since: int, now: int) -> None:
        self._write(TaskWeights(since=since, weights={task: 0.0}, why=why, asked=False), now)

    def enable(self, task: str, *, since: int, now: int) -> None:
        self._write(
            TaskWeights(since=since, weights={task: 1.0}, why="well again", asked=False), now
        )

    def requested(self, update: int) -> dict[str, float]:
        """What was asked for."""
        row = self._last(update)
        return {task: row.weights.get(task, 0.0) for task in self._tasks}

    def disabled(self, update: int) -> dict[str, TaskWeights]:
        """The tasks that get nothing now, each with since when and why."""
        last = {task: row for row in self._past(update, asked=False) for task in row.weights}
        return {task: row for task, row in last.items() if not row.weights[task]}

    def weights(self, update: int) -> dict[str, float]:
        """What holds for the batch that begins with `update`. Raises RunAborted if every task that
        should have a share is set aside."""
        asked, aside = self.requested(update), self.disabled(update)
        left = {task: 0.0 if task in aside else weight for task, weight in asked.items()}
        if not any(left.values()):
            reasons = "; ".join(f"{t}: {row.why}" for t, row in aside.items() if asked.get(t))
            raise RunAbortedError(f"no task is left to train on: {reasons}")
        return left

    def effective_since(self, update: int) -> int:
        """The update from which on these weights hold."""
        aside = max((row.since for row in self._past(update, asked=False)), default=0)
        return max(self._last(update).since, aside)

    def _last(self, update: int) -> TaskWeights:
        return self._past(update, asked=True)[-1]

    def _past(self, update: int, *, asked: bool) -> list[TaskWeights]:
        rows = [row for row in self._rows if row.asked == asked and row.since <= update]
        return sorted(rows, key=lambda row: row.since)  # stable: the later written wins

    def _write(self, row: TaskWeights, now: int) -> None:
        self._ledger.record_task_weights(row, now=now)
        self._rows.append(row)


def validate_ratios(ratios: Mapping[str, float], tasks: Collection[str]) -> dict[str, float]:
    unknown = sorted(set(ratios) - set(tasks))
    if unknown:
        raise TaskRatioError(f"ratios name a task '{unknown[0]}'; there are {', '.join(tasks)}")
    for task, ratio in ratios.items():
        if not isfinite(ratio) or ratio < 0:
            raise TaskRatioError(f"the ratio of '{task}' is {ratio}, not zero or more")
    if not any(ratios.values()):
        raise TaskRatioError("all ratios are zero")
    return dict(ratios)
