"""Whether a task is worth its share: groups that fail or teach nothing, in a row."""

from collections import Counter
from collections.abc import Iterable, Mapping

from paddock.journal import GroupRecord
from paddock.rollout.settings import TaskSettings

STALE = "stale"  # how the reason of a group begins that was too old to train: nobody's fault


class RunAbortedError(ValueError):
    """The run cannot go on; the message says which task and why."""


class TaskHealthMonitor:
    """Counts what each task's groups came to, and says when a budget is spent.

    >>> health = TaskHealthMonitor({"sums": TaskSettings(failure_budget=2)})
    >>> health.record_group("sums", "failed", "world at start"), health.record_group("sums", "failed", "the same")
    ('', '2 groups in a row failed, the last: the same')
    """

    def __init__(self, tasks: Mapping[str, TaskSettings]) -> None:
        self._tasks = tasks
        self._failed: Counter[str] = Counter()
        self._filtered: Counter[str] = Counter()

    def record_group(self, task: str, status: str, reason: str) -> str:
        """Take note of a group that ended; why its task should be set aside, if it should."""
        settings = self._tasks[task]
        if status == "finished":
            self.reset(task)
        elif status == "failed":
            self._failed[task] += 1
            if self._failed[task] >= settings.max_consecutive_failed:
                return f"{self._failed[task]} groups in a row failed, the last: {reason}"
        else:
            self._failed[task] = 0
            self._filtered[task] += 1
            if self._filtered[task] >= settings.max_consecutive_filtered:
                return f"{self._filtered[task]} groups in a row had nothing to teach: {reason}"
        return ""

    def reset(self, task: str) -> None:
        self._failed[task] = self._filtered[task] = 0

    def restore(self, entries: Iterable[GroupRecord]) -> None:
        """Take note of groups of the past, in the order in which they ended."""
        for entry in sorted(entries, key=lambda entry: entry.ended or 0):
            if entry.task in self._tasks and not entry.reason.startswith(STALE):
                status = "finished" if entry.status == "trained" else entry.status
                self.record_group(entry.task, status, entry.reason)
