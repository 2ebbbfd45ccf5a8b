"""Batch composition under bounded staleness and task ratios.

Pure functions over the live groups: issued, and neither trained nor dropped. Every batch keeps the
task ratios, however fast a task is. The staleness bound comes first: a group can be trained for a
known number of batches, and never more groups are live than those batches can take, so waiting for
the last group always suffices.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paddock.rollout.settings import RolloutSettings
from paddock.rollout.task_schedule import next_task, next_tasks

UNBOUNDED = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveGroup:
    """A group that was issued and is neither trained nor dropped."""

    ordinal: int
    task: str
    number: int
    oldest_version: int | None  # oldest version that may have sampled a token; None: not started
    finished: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchContext:
    """Policy version, update number and task weights that the next batch is composed under."""

    update: int  # first update of the batch
    version: int  # weight version that engines serve
    task_weights: Mapping[str, float]
    taken: Mapping[str, float]  # by task, in batches since these weights hold
    costs: Mapping[str, float] | None = None  # what a group adds to `taken`; None: 1


@dataclass(frozen=True, slots=True)
class BatchReady:
    """Groups of the next batch, ordered by task and number: finishing order does not matter."""

    ordinals: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchIncomplete:
    """Which groups are unfinished, and how many more of each task must be started."""

    unfinished: tuple[int, ...]
    missing: Mapping[str, int]


def batches_until_stale(settings: RolloutSettings, since: int, update: int) -> int:
    """How many batches, starting with the one of `update`, may train tokens of version `since`.

    The last update of a batch must be within the staleness bound too.

    >>> settings = RolloutSettings(max_staleness=5, updates_per_batch=2)
    >>> [batches_until_stale(settings, since=10, update=n) for n in (10, 12, 14, 16)]
    [3, 2, 1, 0]
    """
    last_first = since + settings.max_staleness - (settings.updates_per_batch - 1)
    return max(0, (last_first - update) // settings.updates_per_batch + 1)


def is_stale(settings: RolloutSettings, since: int | None, update: int) -> bool:
    """Whether tokens of version `since` exceed `max_staleness` in the batch of `update`."""
    return since is not None and batches_until_stale(settings, since, update) == 0


def groups_allowed(
    live: Iterable[LiveGroup],
    context: BatchContext,
    settings: RolloutSettings,
    *,
    started_only: bool,
) -> int:
    """How many more groups may be issued (`started_only`: started) without exceeding staleness.

    That is the capacity of the batches before tokens sampled now are too stale.
    """
    if settings.on_stale == "drop":
        return UNBOUNDED
    capacity = settings.groups_per_batch * batches_until_stale(
        settings, context.version, context.update
    )
    return capacity - sum(group.oldest_version is not None or not started_only for group in live)


def tasks_to_issue(
    live: Sequence[LiveGroup], context: BatchContext, settings: RolloutSettings, *, ahead: int
) -> list[str]:
    """Tasks of the groups to issue to fill the next `ahead` batches, most urgent first."""
    limit = max(0, groups_allowed(live, context, settings, started_only=False))
    available = Counter(group.task for group in live)
    tasks = []
    for task in next_tasks(
        context.task_weights, context.taken, settings.groups_per_batch * ahead, context.costs
    ):
        if available[task] > 0:
            available[task] -= 1
        else:
            tasks.append(task)
    return tasks[:limit]


def compose_batch(
    live: Sequence[LiveGroup], context: BatchContext, settings: RolloutSettings
) -> BatchReady | BatchIncomplete:
    """The next batch, or what it waits for. No group of `live` may be stale."""
    started = [group for group in live if group.oldest_version is not None]
    chosen = groups_due(started, context, settings) if settings.on_stale == "wait" else []
    costs = context.costs or dict.fromkeys(context.task_weights, 1)
    taken = defaultdict[str, float](float, context.taken)
    for group in chosen:
        taken[group.task] += costs.get(group.task, 0)
    candidates = _candidates(started, chosen, settings)
    allowed = groups_allowed(live, context, settings, started_only=True)
    missing: Counter[str] = Counter()
    while len(chosen) + missing.total() < settings.groups_per_batch:
        among = context.task_weights if allowed > 0 else candidates
        task = next_task(context.task_weights, taken, among, costs)
        if task is None:  # no group of a task with weight can come
            task = min(candidates, key=lambda name: candidates[name][0].ordinal, default=None)
        if task is None:
            return BatchIncomplete((), {})
        taken[task] += costs.get(task, 0)
        if task not in candidates:
            missing[task] += 1
            allowed -= 1
            continue
        chosen.append(candidates[task].pop(0))
        if not candidates[task]:
            del candidates[task]
    unfinished = tuple(sorted(group.ordinal for group in chosen if not group.finished))
    if unfinished or missing:
        return BatchIncomplete(unfinished, dict(missing))
    return BatchReady(tuple(g.ordinal for g in sorted(chosen, key=lambda g: (g.task, g.number))))


def groups_due(
    started: Sequence[LiveGroup], context: BatchContext, settings: RolloutSettings
) -> list[LiveGroup]:
    """Groups that the next batch must take, or a later batch would have to take too many.

    If h batches can still take a set of groups, each of the h - 1 later ones takes a whole batch of
    it; the rest is due now. Groups of the current version have the longest time, and
    `groups_allowed` has bounded their number.
    """
    by_left = defaultdict(list)
    for group in started:
        assert group.oldest_version is not None
        by_left[batches_until_stale(settings, group.oldest_version, context.update)].append(group)
    by_left.pop(batches_until_stale(settings, context.version, context.update), None)
    chosen: list[LiveGroup] = []
    waiting: list[LiveGroup] = []
    for left in sorted(by_left):
        waiting += by_left[left]
        waiting.sort(key=_soonest if settings.order == "oldest_first" else lambda g: g.ordinal)
        must = max(0, len(waiting) - settings.groups_per_batch * (left - 1))
        must = min(must, settings.groups_per_batch - len(chosen))
        chosen += waiting[:must]
        del waiting[:must]
    return chosen


def _soonest(group: LiveGroup) -> tuple[bool, int, int]:
    return not group.finished, group.oldest_version or 0, group.ordinal


def _candidates(
    started: Iterable[LiveGroup], chosen: Sequence[LiveGroup], settings: RolloutSettings
) -> dict[str, list[LiveGroup]]:
    """Further groups that a batch could take, by task, in order of preference."""
    taken = {group.ordinal for group in chosen}
    found: dict[str, list[LiveGroup]] = {}
    for group in started:
        if group.ordinal not in taken:
            found.setdefault(group.task, []).append(group)
    for groups in found.values():
        groups.sort(key=_soonest if settings.order == "oldest_first" else lambda g: g.number)
    return found
