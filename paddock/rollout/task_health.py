"""Task health: disables tasks after too many consecutive failed or filtered groups."""

from collections import Counter
from collections.abc import Iterable, Mapping

from paddock.journal import GroupRecord
from paddock.rollout.settings import TaskSettings

STALE = "stale"  # prefix of the reason of groups dropped for staleness, which do not count


class RunAbortedError(ValueError):
    """The run cannot continue; the message says which task failed and why."""


class TaskHealthMonitor:
    """Counts consecutive failed and filtered groups of each task.

    >>> health = TaskHealthMonitor({"sums": TaskSettings(max_consecutive_failed=2)})
    >>> health.record_group("sums", "failed", "environment at start")
    ''
    >>> health.record_group("sums", "failed", "the same")
    '2 consecutive groups failed, the last: the same'
    """

    def __init__(self, tasks: Mapping[str, TaskSettings]) -> None:
        self._tasks = dict(tasks)
        self._failed: Counter[str] = Counter()
        self._filtered: Counter[str] = Counter()

    def watch(self, task: str, settings: TaskSettings) -> None:
        """A task that is new or has other limits."""
        self._tasks[task] = settings

    def record_group(self, task: str, status: str, reason: str) -> str:
        """Count a group that ended. Returns why its task should be disabled, or an empty string."""
        settings = self._tasks[task]
        if status == "finished":
            self.reset(task)
        elif status == "failed":
            self._failed[task] += 1
            if self._failed[task] >= settings.max_consecutive_failed:
                return f"{self._failed[task]} consecutive groups failed, the last: {reason}"
        else:
            self._failed[task] = 0
            self._filtered[task] += 1
            if self._filtered[task] >= settings.max_consecutive_filtered:
                return f"{self._filtered[task]} consecutive groups were filtered: {reason}"
        return ""

    def reset(self, task: str) -> None:
        self._failed[task] = self._filtered[task] = 0

    def restore(self, entries: Iterable[GroupRecord]) -> None:
        """Count groups of an earlier process, in the order in which they ended."""
        for entry in sorted(entries, key=lambda entry: entry.ended or 0):
            if entry.task in self._tasks and not entry.reason.startswith(STALE):
                status = "finished" if entry.status == "trained" else entry.status
                self.record_group(entry.task, status, entry.reason)
