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


def test_shares_hold_at_every_moment():
    taken = Counter()
    for place, task in enumerate(next_tasks(WEIGHTS, {}, 900), start=1):
        taken[task] += 1
        for name, weight in WEIGHTS.items():
            assert abs(taken[name] - place * weight / 9) < 1
    assert taken == {"a": 500, "b": 300, "c": 100}


def test_seats_go_on_where_they_were():
    whole = next_tasks(WEIGHTS, {}, 40)
    assert next_tasks(WEIGHTS, Counter(whole[:17]), 23) == whole[17:]


def test_no_two_attempts_of_a_run_share_their_luck():
    seeds = {
        RolloutSpec.derive(task, number, member, seed=seed).seed
        for task in ("a", "b")
        for number in range(40)
        for member in range(8)
        for seed in (0, 1)
    }
    assert len(seeds) == 2 * 40 * 8 * 2
    assert RolloutSpec.derive("a", 3, 1, seed=9) == RolloutSpec.derive("a", 3, 1, seed=9)


def alive(ordinal, *, task="a", since=0, finished=True):
    return LiveGroup(
        ordinal=ordinal, task=task, number=ordinal, oldest_version=since, finished=finished
    )


def at(update, *, version=None, weights=None, taken=None):
    return BatchContext(
        update=update,
        version=update if version is None else version,
        task_weights=weights or {"a": 1.0},
        groups_taken=taken or {},
    )


def test_a_group_at_its_deadline_is_waited_for_and_comes_before_younger_ones():
    pace = RolloutSettings(groups_per_batch=2, max_staleness=2, pipeline_depth=2)
    groups = [alive(0, since=1, finished=False), alive(1, since=2), alive(2, since=2)]
    assert compose_batch(groups, at(3), pace) == BatchIncomplete((0,), {})
    assert compose_batch([alive(0, since=1), *groups[1:]], at(3), pace) == BatchReady((0, 1))
    assert compose_batch(groups, at(2), pace) == BatchReady(
        (1, 2)
    )  # one batch earlier there is time


def test_more_than_a_batch_near_its_deadline_is_spread_over_what_is_left():
    """Three groups that two batches of two can still take: one of them is due now."""
    pace = RolloutSettings(groups_per_batch=2, max_staleness=3, pipeline_depth=3)
    old = [alive(n, since=0, finished=n == 2) for n in range(3)]
    assert [batches_until_stale(pace, 0, update) for update in (2, 3, 4)] == [2, 1, 0]
    assert [group.ordinal for group in groups_due(old, at(2), pace)] == [2]
    assert groups_due(old[:2], at(2), pace) == []


@pytest.mark.parametrize("n", range(200))
def test_waiting_is_always_enough(n):
    """Whatever is begun and taken under the rules, no group passes its deadline untrained."""
    rng = Random(n)
    updates = rng.choice([1, 2])
    pace = RolloutSettings(
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
        moment = at(update, version=version, weights=weights, taken=dict(taken))
        for task in tasks_to_issue(groups, moment, pace, ahead=pace.pipeline_depth + 1):
            groups.append(alive(ordinal, task=task, since=version, finished=False))
            ordinal += 1
        assert groups_allowed(groups, moment, pace, started_only=True) >= 0
        while isinstance(found := compose_batch(groups, moment, pace), BatchIncomplete):
            assert not found.missing  # everything it could wish for is under way
            done = rng.choice([g for g in groups if not g.finished])  # anyone may finish next
            place = groups.index(done)
            groups[place] = alive(done.ordinal, task=done.task, since=done.oldest_version)
        assert len(found.ordinals) == pace.groups_per_batch
        for group in [g for g in groups if g.ordinal in found.ordinals]:
            assert update + updates - 1 - group.oldest_version <= pace.max_staleness
            taken[group.task] += 1
            groups.remove(group)
        update += updates
        if update - version >= pace.sync_weights_every:
            version = update
        if rng.random() < 0.2:
            weights, taken = {"a": rng.choice([0.0, 1.0]), "b": 1.0}, Counter()


def test_a_task_without_a_share_is_not_begun_but_its_rest_is_trained():
    pace = RolloutSettings(groups_per_batch=2, max_staleness=1, pipeline_depth=1)
    moment = at(1, weights={"a": 1.0, "b": 0.0})
    rest = alive(0, task="b", since=0)
    assert tasks_to_issue([rest], moment, pace, ahead=1) == ["a", "a"]
    found = compose_batch([rest, alive(1, since=1), alive(2, since=1)], moment, pace)
    assert found == BatchReady((1, 0))  # by task; it is due, and takes the place of a younger one


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
def test_a_pace_that_cannot_be_kept_is_refused(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        RolloutSettings(**changes)
