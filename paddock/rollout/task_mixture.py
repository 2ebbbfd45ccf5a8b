"""Task mixture over time: requested ratios, minus disabled tasks.

Every change is recorded in the ledger with the update from which it holds, so that a run resumed
from a checkpoint mixes its tasks as before.
"""

from collections.abc import Collection, Mapping
from math import isfinite

from paddock.journal import Ledger, TaskWeights
from paddock.rollout.task_health import RunAbortedError


class TaskRatioError(ValueError):
    """Invalid task ratios."""


class TaskMixture:
    def __init__(self, ledger: Ledger, ratios: Mapping[str, float]) -> None:
        """`ratios` are those of the recipe. If they are unchanged since an earlier process, all
        changes requested since then still hold."""
        self._ledger = ledger
        self._tasks = tuple(ratios)
        self._recipe = validate_ratios(ratios, ratios)
        self._rows: list[TaskWeights] = []

    def add_task(self, task: str) -> None:
        """A further task; its ratio is 0 until it is requested."""
        self._tasks = tuple(dict.fromkeys((*self._tasks, task)))

    def resume(self, update: int) -> None:
        """Load the changes from the ledger; `update` is the next one."""
        self._rows = self._ledger.task_weights()
        if self._ledger.get_metadata("ratios") != self._recipe:
            self._ledger.set_metadata("ratios", self._recipe)
            self._write(
                TaskWeights(since=update, weights=self._recipe, why="recipe", asked=True), update
            )

    def request_ratios(self, ratios: Mapping[str, float], *, since: int, now: int) -> None:
        """Request other ratios from the batch of update `since` on."""
        requested = validate_ratios(ratios, self._tasks)
        self._write(TaskWeights(since=since, weights=requested, why="requested", asked=True), now)

    def disable(self, task: str, why: str, *, since: int, now: int) -> None:
        self._write(TaskWeights(since=since, weights={task: 0.0}, why=why, asked=False), now)

    def enable(self, task: str, *, since: int, now: int) -> None:
        self._write(
            TaskWeights(since=since, weights={task: 1.0}, why="recovered", asked=False), now
        )

    def requested(self, update: int) -> dict[str, float]:
        """The requested ratios."""
        row = self._last(update)
        return {task: row.weights.get(task, 0.0) for task in self._tasks}

    def disabled(self, update: int) -> dict[str, TaskWeights]:
        """Disabled tasks, each with the row that disabled it."""
        last = {task: row for row in self._past(update, asked=False) for task in row.weights}
        return {task: row for task, row in last.items() if not row.weights[task]}

    def weights(self, update: int) -> dict[str, float]:
        """Task weights of the batch of `update`. Raises RunAbortedError if every task with a ratio
        is disabled."""
        requested, disabled = self.requested(update), self.disabled(update)
        left = {task: 0.0 if task in disabled else weight for task, weight in requested.items()}
        if not any(left.values()):
            reasons = "; ".join(
                f"{t}: {row.why}" for t, row in disabled.items() if requested.get(t)
            )
            raise RunAbortedError(f"no task is left to train on: {reasons}")
        return left

    def effective_since(self, update: int) -> int:
        """The update from which these weights hold."""
        changed = max((row.since for row in self._past(update, asked=False)), default=0)
        return max(self._last(update).since, changed)

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
        raise TaskRatioError(
            f"unknown task '{unknown[0]}' in ratios; must be one of {', '.join(tasks)}"
        )
    for task, ratio in ratios.items():
        if not isfinite(ratio) or ratio < 0:
            raise TaskRatioError(f"ratio of '{task}' must be finite and not negative, got {ratio}")
    if not any(ratios.values()):
        raise TaskRatioError("at least one ratio must be positive")
    return dict(ratios)
