"""What goes into the next batch, and what must be begun for those after it.

Pure arithmetic over the groups that are alive: issued, and neither trained nor ended otherwise. The
shares of tasks hold in every batch, whichever task is fast. The bound on staleness comes before
them: a group is alive for a known number of batches, and never are more groups alive than those
batches can take, so that waiting for the last of them is always enough.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paddock.rollout.settings import RolloutSettings
from paddock.rollout.task_schedule import next_task, next_tasks

UNBOUNDED = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveGroup:
    """A group that is alive."""

    ordinal: int
    task: str
    number: int
    oldest_version: (
        int | None
    )  # the oldest version that may have sampled any of it; None: not begun
    finished: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchContext:
    """What the next batch is made under."""

    update: int  # its first
    version: int  # what engines serve now
    task_weights: Mapping[str, float]  # of tasks
    groups_taken: Mapping[str, int]  # groups of each task in batches since these weights hold


@dataclass(frozen=True, slots=True)
class BatchReady:
    ordinals: tuple[int, ...]  # by task and number, whoever was issued or finished first


@dataclass(frozen=True, slots=True)
class BatchIncomplete:
    """No batch yet: these have not finished, and so many more of these tasks must be begun."""

    unfinished: tuple[int, ...]
    missing: Mapping[str, int]


def batches_until_stale(pace: RolloutSettings, since: int, update: int) -> int:
    """How many batches, the one whose first update is `update` included, may still train what
    version `since` has sampled. The last update of a batch is within the bound too.

    >>> pace = RolloutSettings(max_staleness=5, updates_per_batch=2)
    >>> [batches_until_stale(pace, since=10, update=n) for n in (10, 12, 14, 16)]
    [3, 2, 1, 0]
    """
    last_first = since + pace.max_staleness - (pace.updates_per_batch - 1)
    return max(0, (last_first - update) // pace.updates_per_batch + 1)


def is_stale(pace: RolloutSettings, since: int | None, update: int) -> bool:
    """Whether the batch that begins with `update` comes too late for it."""
    return since is not None and batches_until_stale(pace, since, update) == 0


def groups_allowed(
    alive: Iterable[LiveGroup], moment: BatchContext, pace: RolloutSettings, *, begun: bool
) -> int:
    """How many more groups may be issued, or begun, now: as many as the batches can take that come
    before what is sampled now is too old."""
    if pace.on_stale == "drop":
        return UNBOUNDED
    places = pace.groups_per_batch * batches_until_stale(pace, moment.version, moment.update)
    return places - sum(group.oldest_version is not None or not begun for group in alive)


def tasks_to_issue(
    alive: Sequence[LiveGroup], moment: BatchContext, pace: RolloutSettings, *, ahead: int
) -> list[str]:
    """The tasks of which groups must be issued so that the next `ahead` batches have theirs, the
    soonest needed first."""
    most = max(0, groups_allowed(alive, moment, pace, begun=False))
    there = Counter(group.task for group in alive)
    found = []
    for task in next_tasks(moment.task_weights, moment.groups_taken, pace.groups_per_batch * ahead):
        if there[task] > 0:
            there[task] -= 1
        else:
            found.append(task)
    return found[:most]


def compose_batch(
    alive: Sequence[LiveGroup], moment: BatchContext, pace: RolloutSettings
) -> BatchReady | BatchIncomplete:
    """The next batch, or what it waits for. None of `alive` may be stale."""
    begun = [group for group in alive if group.oldest_version is not None]
    chosen = groups_due(begun, moment, pace) if pace.on_stale == "wait" else []
    taken = Counter(moment.groups_taken)
    taken.update(group.task for group in chosen)
    candidates = _candidates(begun, chosen, pace)
    spare = groups_allowed(alive, moment, pace, begun=True)
    short: Counter[str] = Counter()
    while len(chosen) + short.total() < pace.groups_per_batch:
        task = next_task(
            moment.task_weights, taken, moment.task_weights if spare > 0 else candidates
        )
        if task is None:  # of the tasks that have a share, nothing can come any more
            task = min(candidates, key=lambda name: candidates[name][0].ordinal, default=None)
        if task is None:
            return BatchIncomplete((), {})
        taken[task] += 1
        if task not in candidates:
            short[task] += 1
            spare -= 1
            continue
        chosen.append(candidates[task].pop(0))
        if not candidates[task]:
            del candidates[task]
    unfinished = tuple(sorted(group.ordinal for group in chosen if not group.finished))
    if unfinished or short:
        return BatchIncomplete(unfinished, dict(short))
    return BatchReady(tuple(g.ordinal for g in sorted(chosen, key=lambda g: (g.task, g.number))))


def groups_due(
    begun: Sequence[LiveGroup], moment: BatchContext, pace: RolloutSettings
) -> list[LiveGroup]:
    """Those that the next batch must take, or one after it would have to take more than it can.

    If h batches can still take a set of groups, the h - 1 after this one take a batch of it each;
    what is left over is due now. What the present version samples has the longest time of all, and
    `room` has seen to it that there is not too much of it.
    """
    by_left = defaultdict(list)
    for group in begun:
        assert group.oldest_version is not None
        by_left[batches_until_stale(pace, group.oldest_version, moment.update)].append(group)
    by_left.pop(batches_until_stale(pace, moment.version, moment.update), None)
    chosen: list[LiveGroup] = []
    waiting: list[LiveGroup] = []
    for left in sorted(by_left):
        waiting += by_left[left]
        waiting.sort(key=_soonest if pace.order == "oldest_first" else lambda g: g.ordinal)
        must = max(0, len(waiting) - pace.groups_per_batch * (left - 1))
        must = min(must, pace.groups_per_batch - len(chosen))
        chosen += waiting[:must]
        del waiting[:must]
    return chosen


def _soonest(group: LiveGroup) -> tuple[bool, int, int]:
    return not group.finished, group.oldest_version or 0, group.ordinal


def _candidates(
    begun: Iterable[LiveGroup], chosen: Sequence[LiveGroup], pace: RolloutSettings
) -> dict[str, list[LiveGroup]]:
    """What else a batch could take, by task, in the order in which it would."""
    gone = {group.ordinal for group in chosen}
    found: dict[str, list[LiveGroup]] = {}
    for group in begun:
        if group.ordinal not in gone:
            found.setdefault(group.task, []).append(group)
    for groups in found.values():
        groups.sort(key=_soonest if pace.order == "oldest_first" else lambda g: g.number)
    return found
