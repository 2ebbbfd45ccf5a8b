"""What ratios are shares of: trained groups, their tokens, or the seconds their rollouts took.

The next group goes to the task furthest behind its share, where a group counts what the last groups
of its task did. Counts and estimates come from the trained groups in the ledger alone, and change
only when a batch is taken: a resumed run decides the same.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from statistics import fmean

from paddock.journal import GroupRecord, Ledger
from paddock.rollout.settings import RatioUnit

WINDOW = 32  # trained groups of a task that its next one is estimated from


class TaskCosts:
    """What was trained of each task since its weight holds, and what a group of it will add."""

    def __init__(self, ledger: Ledger, unit: RatioUnit) -> None:
        self._ledger, self._unit = ledger, unit
        self.taken: defaultdict[str, float] = defaultdict(float)
        self._since = 0
        self._recent: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))

    def count_from(self, since: int) -> None:
        """Task weights hold from this update on: what was taken before does not count."""
        if since != self._since:
            self.taken.clear()
            self._since = since

    def take(self, records: Iterable[GroupRecord]) -> None:
        """Count the groups of a batch."""
        for record in records:
            cost = self._cost(record)
            self.taken[record.task] += cost
            self._recent[record.task].append(cost)

    def resume(self, records: Iterable[GroupRecord], since: int) -> None:
        """Count all groups that were trained, in the order in which they were taken."""
        self.taken.clear()
        self._recent.clear()
        self._since = since
        trained = [record for record in records if record.trained is not None]
        for record in sorted(trained, key=lambda r: (r.trained, r.task, r.number)):
            cost = self._cost(record)
            self._recent[record.task].append(cost)
            if record.trained is not None and record.trained >= since:
                self.taken[record.task] += cost

    def per_group(self, tasks: Iterable[str]) -> Mapping[str, float]:
        """The estimate of one group of each task; of an unknown one, the mean of the others."""
        known = {task: fmean(costs) for task, costs in self._recent.items() if any(costs)}
        unknown = fmean(known.values()) if known else 1.0
        return {task: known.get(task, unknown) for task in tasks}

    def _cost(self, record: GroupRecord) -> float:
        if self._unit == "groups":
            return 1.0
        return self._ledger.group_cost(record.ordinal, self._unit)
