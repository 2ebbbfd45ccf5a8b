"""Staleness and order: what reaches the trainer, read off the tokens themselves."""

import asyncio
from collections import Counter

import pytest

from paddock.journal import Ledger
from paddock.records import Verdict
from paddock.rollout.settings import RolloutSettings, TaskSettings
from paddock.rollout.task_health import RunAbortedError
from paddock.rollout.task_schedule import RolloutSpec, next_tasks
from tests.rollout.schedules import DELAYS, lags, schedule
from tests.rollout.virtual_time import BASE, Engine, content, learn, number, run, sampled


def check_schedule(n):
    pace, tasks, engine, step_s = schedule(n)
    (learner, ledger), _ = run(learn(engine, pace, batches=4, tasks=tasks, step_s=step_s))
    assert len(learner.batches) == 4
    for batch in learner.batches:
        assert len(batch.groups) == pace.groups_per_batch
        found = lags(batch, pace)
        assert min(found) >= 0 and max(found) <= pace.max_staleness, (n, pace)
    balance = ledger.group_counts()
    assert balance.is_consistent, (n, balance)
    assert balance.trained == 4 * pace.groups_per_batch
    assert pace.on_stale == "drop" or balance.filtered == 0, (n, balance)
    ledger.close()
    return balance


def test_no_token_is_older_than_the_bound():
    for n in range(40):
        check_schedule(n)


@pytest.mark.slow
def test_no_token_is_older_than_the_bound_over_a_thousand_schedules():
    dropped = 0
    for n in range(1000):
        dropped += check_schedule(n).filtered
    assert dropped > 100  # the schedules are hard enough to make the other mode drop


def synchronous(batches, *, tasks, seed, groups):
    """The loop without any of the machinery: the weights after each update."""
    weights, taken, numbers, history = "start", Counter(), Counter(), []
    ratios = {name: task.ratio for name, task in tasks.items()}
    for version in range(batches):
        batch = []
        for task in next_tasks(ratios, taken, groups):
            taken[task] += 1
            given = [
                RolloutSpec.derive(task, numbers[task], member, seed=seed)
                for member in range(tasks[task].group_size)
            ]
            ids = [
                version * BASE + number(weights, g.seed, p) % BASE for g in given for p in (0, 1)
            ]
            batch.append(
                (
                    task,
                    numbers[task],
                    [ids, ["Verdict(reward=1.0, parts={}, note='')"] * len(given)],
                )
            )
            numbers[task] += 1
        weights = str(number(weights, sorted(batch)))
        history.append(weights)
    return history


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("order", ["in_order", "oldest_first"])
@pytest.mark.parametrize("delay", ["heavy tail", "one task crawls"])
def test_bound_zero_is_the_synchronous_loop_bit_for_bit(depth, order, delay):
    pace = RolloutSettings(groups_per_batch=4, pipeline_depth=depth, max_staleness=0, order=order)
    tasks = {"t0": TaskSettings(group_size=3, ratio=2.0), "t1": TaskSettings(group_size=2)}
    engine = Engine(
        delay=DELAYS[delay],
        tokens=lambda given, rng: 2,
        outcome=lambda given, rng: Verdict(reward=1.0),
        seed=depth,
    )
    (learner, _), _ = run(learn(engine, pace, batches=6, tasks=tasks, seed=11))
    assert learner.history == synchronous(6, tasks=tasks, seed=11, groups=4)


def test_depth_zero_is_synchronous_whatever_the_bound():
    tasks = {"t0": TaskSettings(group_size=2)}
    histories = []
    for staleness in (0, 7):
        pace = RolloutSettings(groups_per_batch=3, pipeline_depth=0, max_staleness=staleness)
        (learner, _), _ = run(learn(Engine(), pace, batches=5, tasks=tasks))
        histories.append(learner.history)
    assert histories[0] == histories[1]


def slow_and_fast(bound_by, *, batches=40):
    """Every fifth problem takes a hundred times as long; how many of each kind were trained, of
    those issued long ago."""
    pace = RolloutSettings(
        groups_per_batch=5,
        pipeline_depth=3,
        max_staleness=4,
        on_stale=bound_by,
        max_concurrent=1000,
    )
    engine = Engine(
        tokens=lambda given, rng: 1,
        delay=lambda given, rng: 10.0 if given.number % 5 == 0 else 0.1,
    )
    (learner, ledger), took = run(learn(engine, pace, batches=batches))
    trained = [group.number for batch in learner.batches for group in batch.groups]
    old = [n for n in trained if n < batches * 5 - 5 * (pace.pipeline_depth + 1)]
    slow = sum(n % 5 == 0 for n in old)
    assert ledger.group_counts().is_consistent
    return slow, len(old) - slow, ledger.group_counts(), took


def test_waiting_trains_slow_problems_as_often_as_fast_ones_and_discards_nothing():
    slow, fast, balance, _ = slow_and_fast("wait")
    assert fast == 4 * slow
    assert balance.filtered == balance.failed == 0


def test_dropping_starves_slow_problems_and_says_how_many():
    slow, fast, balance, _ = slow_and_fast("drop")
    assert slow < fast / 8
    assert balance.filtered > 10


@pytest.mark.parametrize("n", range(12))
def test_what_is_dropped_is_exactly_what_is_too_old_and_is_refilled(n):
    pace, tasks, engine, step_s = schedule(n, on_stale="drop", pipeline_depth=3, max_staleness=4)
    (learner, ledger), _ = run(learn(engine, pace, batches=8, tasks=tasks, step_s=step_s))
    assert [len(batch.groups) for batch in learner.batches] == [pace.groups_per_batch] * 8
    last = learner.batches[-1].update + pace.updates_per_batch - 1
    for entry in ledger.groups("filtered"):
        assert entry.reason.startswith("stale"), entry
        if len(ledger.rollouts(entry.ordinal)) == entry.size:
            assert last - oldest(ledger, entry) > pace.max_staleness
    for entry in ledger.groups("finished"):
        assert last - oldest(ledger, entry) <= pace.max_staleness
    balance = ledger.group_counts()
    assert balance.issued == balance.trained + balance.filtered + balance.in_flight
    assert balance.filtered == len(ledger.groups("filtered"))


def oldest(ledger, entry):
    tokens = [t for attempt in ledger.rollouts(entry.ordinal).values() for t in sampled_of(attempt)]
    return min(tokens) // BASE


def sampled_of(branches):
    return [t for branch in branches for turn in branch.turns for t in turn.completion.token_ids]


def test_new_weights_reach_attempts_that_are_under_way():
    pace = RolloutSettings(groups_per_batch=2, pipeline_depth=3, max_staleness=6)
    engine = Engine(tokens=lambda given, rng: 8)
    (learner, _), _ = run(learn(engine, pace, batches=12, step_s=lambda: 0.5))
    mixed = 0
    for batch in learner.batches:
        for group in batch.groups:
            for attempt in group.rollouts:
                versions = [token // BASE for token in sampled_of(attempt)]
                assert versions == sorted(versions)
                mixed += len(set(versions)) > 1
    assert mixed > 5


def test_several_updates_a_batch_count():
    """Two updates a batch, published after each batch: even fresh tokens are one update old at
    the second, and one batch ahead makes it three."""
    pace = RolloutSettings(
        groups_per_batch=2, pipeline_depth=1, max_staleness=3, updates_per_batch=2
    )
    engine = Engine(tokens=lambda given, rng: 1, delay=lambda given, rng: 0.1)
    (learner, _), _ = run(learn(engine, pace, batches=6))
    assert max(max(lags(batch, pace)) for batch in learner.batches) == 3
    with pytest.raises(ValueError, match="'max_staleness' 0 is less than 1"):
        RolloutSettings(updates_per_batch=2, max_staleness=0)


def test_an_engine_that_serves_old_weights_is_found_out():
    """It takes every other push: what it samples with the one before is too old, and is never
    trained."""
    pace = RolloutSettings(groups_per_batch=2, pipeline_depth=1, max_staleness=1)
    told = []

    class Lagging(Engine):
        def push(self, version, weights):
            self.weights[version] = weights
            if version % 2 == 0:
                self.version = version

    engine = Lagging(tokens=lambda given, rng: 1, delay=lambda given, rng: 0.3)
    main = learn(
        engine,
        pace,
        batches=6,
        step_s=lambda: 1.0,
        log_event=lambda kind, **more: told.append(kind),
    )
    (learner, ledger), _ = run(main)
    assert max(max(lags(batch, pace)) for batch in learner.batches) <= 1
    assert "group_stale" in told and ledger.group_counts().filtered == told.count("group_stale")


def test_an_engine_that_takes_no_weights_at_all_ends_the_run():
    class Deaf(Engine):
        def push(self, version, weights):
            pass

    engine = Deaf(tokens=lambda given, rng: 1, delay=lambda given, rng: 0.3)
    with pytest.raises(
        RunAbortedError, match="8 consecutive groups failed, the last: stale: 2 updates old"
    ):
        run(learn(engine, RolloutSettings(groups_per_batch=2, max_staleness=1), batches=6))


def test_batches_carry_what_the_engine_wrote():
    engine = Engine()
    (learner, ledger), _ = run(learn(engine, RolloutSettings(groups_per_batch=2), batches=3))
    for batch in learner.batches:
        for group in batch.groups:
            for member, attempt in enumerate(group.rollouts):
                given = RolloutSpec.derive(group.task, group.number, member, seed=0)
                for place, token in enumerate(sampled_of(attempt)):
                    version = token // BASE
                    expected = number(engine.weights[version], given.seed, place) % BASE
                    assert token % BASE == expected
        assert batch.staleness == tuple(batch.update - g.oldest_version for g in batch.groups)
    assert content(learner.batches[0])
    assert isinstance(ledger, Ledger)
    assert sampled(learner.batches[0].groups[0])


def test_the_trainer_waits_no_longer_than_it_must():
    """Attempts of one second, steps of one second: ahead of the trainer, they cost nothing."""
    even = {"tokens": lambda given, rng: 1, "delay": lambda given, rng: 1.0}
    pace = RolloutSettings(groups_per_batch=2, pipeline_depth=1, max_staleness=1)
    _, ahead = run(learn(Engine(**even), pace, batches=20))
    _, synchronous = run(
        learn(Engine(**even), RolloutSettings(pipeline_depth=0, max_staleness=0), batches=20)
    )
    assert (ahead, synchronous) == (21.0, 40.0)


def test_batches_are_asked_for_one_at_a_time():
    async def twice():
        learner, _ = await learn(Engine(), RolloutSettings(), batches=1)
        collect = learner.collect
        collect._batches = 2
        await collect.next_batch()
        await collect.next_batch()

    with pytest.raises(RuntimeError, match="update 1 is not trained yet"):
        run(asyncio.wait_for(twice(), 1000))
