from collections import Counter
from random import Random

import pytest

from paddock.rollout.batch_composer import (
    BatchContext,
    BatchIncomplete,
    BatchReady,
    LiveGroup,
    batches_until_stale,
    compose_batch,
    groups_allowed,
    groups_due,
    tasks_to_issue,
)
from paddock.rollout.settings import RolloutSettings
from paddock.rollout.task_schedule import RolloutSpec, next_tasks

WEIGHTS = {"a": 5.0, "b": 3.0, "c": 1.0, "d": 0.0}


def test_task_weights_hold_after_every_task():
    taken = Counter()
    for position, task in enumerate(next_tasks(WEIGHTS, {}, 900), start=1):
        taken[task] += 1
        for name, weight in WEIGHTS.items():
            assert abs(taken[name] - position * weight / 9) < 1
    assert taken == {"a": 500, "b": 300, "c": 100}


def test_the_task_order_continues_from_the_counts():
    whole = next_tasks(WEIGHTS, {}, 40)
    assert next_tasks(WEIGHTS, Counter(whole[:17]), 23) == whole[17:]


def test_every_rollout_has_its_own_seed():
    seeds = {
        RolloutSpec.derive(task, number, member, seed=seed).seed
        for task in ("a", "b")
        for number in range(40)
        for member in range(8)
        for seed in (0, 1)
    }
    assert len(seeds) == 2 * 40 * 8 * 2
    assert RolloutSpec.derive("a", 3, 1, seed=9) == RolloutSpec.derive("a", 3, 1, seed=9)


def live_group(ordinal, *, task="a", since=0, finished=True):
    return LiveGroup(
        ordinal=ordinal, task=task, number=ordinal, oldest_version=since, finished=finished
    )


def context(update, *, version=None, weights=None, taken=None):
    return BatchContext(
        update=update,
        version=update if version is None else version,
        task_weights=weights or {"a": 1.0},
        taken=taken or {},
    )


def test_a_group_about_to_become_stale_is_awaited_and_taken_first():
    settings = RolloutSettings(groups_per_batch=2, max_staleness=2, pipeline_depth=2)
    groups = [
        live_group(0, since=1, finished=False),
        live_group(1, since=2),
        live_group(2, since=2),
    ]
    assert compose_batch(groups, context(3), settings) == BatchIncomplete((0,), {})
    assert compose_batch([live_group(0, since=1), *groups[1:]], context(3), settings) == BatchReady(
        (0, 1)
    )
    assert compose_batch(groups, context(2), settings) == BatchReady(
        (1, 2)
    )  # one batch earlier it can still wait


def test_groups_near_their_deadline_are_spread_over_the_remaining_batches():
    """Three groups for the two remaining batches of two: one of them is due now."""
    settings = RolloutSettings(groups_per_batch=2, max_staleness=3, pipeline_depth=3)
    old = [live_group(n, since=0, finished=n == 2) for n in range(3)]
    assert [batches_until_stale(settings, 0, update) for update in (2, 3, 4)] == [2, 1, 0]
    assert [group.ordinal for group in groups_due(old, context(2), settings)] == [2]
    assert groups_due(old[:2], context(2), settings) == []


@pytest.mark.parametrize("n", range(200))
def test_waiting_never_lets_a_group_become_stale(n):
    """Whatever is issued and taken by the rules, every group is trained before it is stale."""
    rng = Random(n)
    updates = rng.choice([1, 2])
    settings = RolloutSettings(
        groups_per_batch=rng.randint(1, 4),
        pipeline_depth=rng.randint(0, 5),
        updates_per_batch=updates,
        sync_weights_every=rng.choice([1, 2, 3]),
        max_staleness=3 + rng.randint(0, 4),
        order=rng.choice(["oldest_first", "in_order"]),
    )
    weights = {"a": 1.0, "b": rng.choice([0.0, 0.5, 2.0])}
    groups, taken, update, version, ordinal = [], Counter(), 0, 0, 0
    for _ in range(12):
        moment = context(update, version=version, weights=weights, taken=dict(taken))
        for task in tasks_to_issue(groups, moment, settings, ahead=settings.pipeline_depth + 1):
            groups.append(live_group(ordinal, task=task, since=version, finished=False))
            ordinal += 1
        assert groups_allowed(groups, moment, settings, started_only=True) >= 0
        while isinstance(found := compose_batch(groups, moment, settings), BatchIncomplete):
            assert not found.missing  # every group it needs is issued
            done = rng.choice([g for g in groups if not g.finished])  # any group may finish next
            position = groups.index(done)
            groups[position] = live_group(done.ordinal, task=done.task, since=done.oldest_version)
        assert len(found.ordinals) == settings.groups_per_batch
        for group in [g for g in groups if g.ordinal in found.ordinals]:
            assert update + updates - 1 - group.oldest_version <= settings.max_staleness
            taken[group.task] += 1
            groups.remove(group)
        update += updates
        if update - version >= settings.sync_weights_every:
            version = update
        if rng.random() < 0.2:
            weights, taken = {"a": rng.choice([0.0, 1.0]), "b": 1.0}, Counter()


def test_a_task_with_weight_zero_is_not_issued_but_its_live_groups_are_trained():
    settings = RolloutSettings(groups_per_batch=2, max_staleness=1, pipeline_depth=1)
    moment = context(1, weights={"a": 1.0, "b": 0.0})
    rest = live_group(0, task="b", since=0)
    assert tasks_to_issue([rest], moment, settings, ahead=1) == ["a", "a"]
    found = compose_batch([rest, live_group(1, since=1), live_group(2, since=1)], moment, settings)
    assert found == BatchReady((1, 0))  # ordered by task; group 1 is due and replaces a younger one


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"sync_weights_every": 4, "max_staleness": 2}, "'max_staleness' 2 is less than 3"),
        ({"updates_per_batch": 4, "sync_weights_every": 5, "max_staleness": 6}, "6 is less than 7"),
        ({"deterministic": True}, "'deterministic' needs order"),
        (
            {"deterministic": True, "order": "in_order", "on_stale": "drop"},
            "'deterministic' needs order",
        ),
        ({"max_concurrent": 4, "min_concurrent": 5}, "'min_concurrent' 5 exceeds"),
        ({"groups_per_batch": 0}, "groups_per_batch"),
        ({"max_staleness": -1}, "max_staleness"),
        ({"pipeline_dept": 2}, "pipeline_dept"),
    ],
)
def test_contradictory_rollout_settings_are_rejected(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        RolloutSettings(**changes)
