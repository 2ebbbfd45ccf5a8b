"""Orchestrator: staleness and order of what reaches the trainer, read off the tokens themselves."""

import asyncio
from collections import Counter

import pytest

from paddock.journal import Ledger
from paddock.records import Verdict
from paddock.rollout.settings import RolloutSettings, TaskSettings
from paddock.rollout.task_health import RunAbortedError
from paddock.rollout.task_schedule import RolloutSpec, next_tasks
from tests.rollout.schedules import DELAYS, schedule, token_staleness
from tests.rollout.virtual_time import BASE, Engine, content, learn, number, run, sampled


def check_schedule(n):
    settings, tasks, engine, step_s = schedule(n)
    (learner, ledger), _ = run(learn(engine, settings, batches=4, tasks=tasks, step_s=step_s))
    assert len(learner.batches) == 4
    for batch in learner.batches:
        assert len(batch.groups) == settings.groups_per_batch
        found = token_staleness(batch, settings)
        assert min(found) >= 0 and max(found) <= settings.max_staleness, (n, settings)
    balance = ledger.group_counts()
    assert balance.is_consistent, (n, balance)
    assert balance.trained == 4 * settings.groups_per_batch
    assert settings.on_stale == "drop" or balance.filtered == 0, (n, balance)
    ledger.close()
    return balance


def test_no_token_is_older_than_max_staleness():
    for n in range(40):
        check_schedule(n)


@pytest.mark.slow
def test_no_token_is_older_than_max_staleness_over_a_thousand_schedules():
    dropped = 0
    for n in range(1000):
        dropped += check_schedule(n).filtered
    assert dropped > 100  # the schedules are hard enough to make the other mode drop


def synchronous(batches, *, tasks, seed, groups):
    """A minimal synchronous loop: the weights after each update."""
    weights, taken, numbers, history = "start", Counter(), Counter(), []
    ratios = {name: task.ratio for name, task in tasks.items()}
    for version in range(batches):
        batch = []
        for task in next_tasks(ratios, taken, groups):
            taken[task] += 1
            spec = [
                RolloutSpec.derive(task, numbers[task], member, seed=seed)
                for member in range(tasks[task].group_size)
            ]
            ids = [version * BASE + number(weights, g.seed, p) % BASE for g in spec for p in (0, 1)]
            batch.append(
                (
                    task,
                    numbers[task],
                    [ids, ["Verdict(reward=1.0, parts={}, note='')"] * len(spec)],
                )
            )
            numbers[task] += 1
        weights = str(number(weights, sorted(batch)))
        history.append(weights)
    return history


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("order", ["in_order", "oldest_first"])
@pytest.mark.parametrize("delay", ["heavy tail", "one task crawls"])
def test_max_staleness_zero_equals_the_synchronous_loop(depth, order, delay):
    settings = RolloutSettings(
        groups_per_batch=4, pipeline_depth=depth, max_staleness=0, order=order
    )
    tasks = {"t0": TaskSettings(group_size=3, ratio=2.0), "t1": TaskSettings(group_size=2)}
    engine = Engine(
        delay=DELAYS[delay],
        tokens=lambda spec, rng: 2,
        outcome=lambda spec, rng: Verdict(reward=1.0),
        seed=depth,
    )
    (learner, _), _ = run(learn(engine, settings, batches=6, tasks=tasks, seed=11))
    assert learner.history == synchronous(6, tasks=tasks, seed=11, groups=4)


def test_pipeline_depth_zero_is_synchronous_for_any_max_staleness():
    tasks = {"t0": TaskSettings(group_size=2)}
    histories = []
    for staleness in (0, 7):
        settings = RolloutSettings(groups_per_batch=3, pipeline_depth=0, max_staleness=staleness)
        (learner, _), _ = run(learn(Engine(), settings, batches=5, tasks=tasks))
        histories.append(learner.history)
    assert histories[0] == histories[1]


def slow_and_fast(on_stale, *, batches=40):
    """Every fifth problem takes a hundred times as long; counts how many of each kind were trained
    among those issued long ago."""
    settings = RolloutSettings(
        groups_per_batch=5,
        pipeline_depth=3,
        max_staleness=4,
        on_stale=on_stale,
        max_concurrent=1000,
    )
    engine = Engine(
        tokens=lambda spec, rng: 1,
        delay=lambda spec, rng: 10.0 if spec.number % 5 == 0 else 0.1,
    )
    (learner, ledger), took = run(learn(engine, settings, batches=batches))
    trained = [group.number for batch in learner.batches for group in batch.groups]
    old = [n for n in trained if n < batches * 5 - 5 * (settings.pipeline_depth + 1)]
    slow = sum(n % 5 == 0 for n in old)
    assert ledger.group_counts().is_consistent
    return slow, len(old) - slow, ledger.group_counts(), took


def test_on_stale_wait_trains_slow_problems_as_often_as_fast_ones():
    slow, fast, balance, _ = slow_and_fast("wait")
    assert fast == 4 * slow
    assert balance.filtered == balance.failed == 0


def test_on_stale_drop_drops_mostly_slow_problems_and_counts_them():
    slow, fast, balance, _ = slow_and_fast("drop")
    assert slow < fast / 8
    assert balance.filtered > 10


@pytest.mark.parametrize("n", range(12))
def test_exactly_the_stale_groups_are_dropped_and_replaced(n):
    settings, tasks, engine, step_s = schedule(
        n, on_stale="drop", pipeline_depth=3, max_staleness=4
    )
    (learner, ledger), _ = run(learn(engine, settings, batches=8, tasks=tasks, step_s=step_s))
    assert [len(batch.groups) for batch in learner.batches] == [settings.groups_per_batch] * 8
    last = learner.batches[-1].update + settings.updates_per_batch - 1
    for entry in ledger.groups("filtered"):
        assert entry.reason.startswith("stale"), entry
        if len(ledger.rollouts(entry.ordinal)) == entry.size:
            assert last - oldest(ledger, entry) > settings.max_staleness
    for entry in ledger.groups("finished"):
        assert last - oldest(ledger, entry) <= settings.max_staleness
    balance = ledger.group_counts()
    assert balance.issued == balance.trained + balance.filtered + balance.in_flight
    assert balance.filtered == len(ledger.groups("filtered"))


def oldest(ledger, entry):
    tokens = [t for rollout in ledger.rollouts(entry.ordinal).values() for t in sampled_of(rollout)]
    return min(tokens) // BASE


def sampled_of(branches):
    return [t for branch in branches for turn in branch.turns for t in turn.completion.token_ids]


def test_new_weights_reach_running_rollouts():
    settings = RolloutSettings(groups_per_batch=2, pipeline_depth=3, max_staleness=6)
    engine = Engine(tokens=lambda spec, rng: 8)
    (learner, _), _ = run(learn(engine, settings, batches=12, step_s=lambda: 0.5))
    mixed = 0
    for batch in learner.batches:
        for group in batch.groups:
            for rollout in group.rollouts:
                versions = [token // BASE for token in sampled_of(rollout)]
                assert versions == sorted(versions)
                mixed += len(set(versions)) > 1
    assert mixed > 5


def test_staleness_counts_every_update_of_a_batch():
    """Two updates per batch, published after each batch: fresh tokens are one update old at the
    second, and one batch ahead makes it three."""
    settings = RolloutSettings(
        groups_per_batch=2, pipeline_depth=1, max_staleness=3, updates_per_batch=2
    )
    engine = Engine(tokens=lambda spec, rng: 1, delay=lambda spec, rng: 0.1)
    (learner, _), _ = run(learn(engine, settings, batches=6))
    assert max(max(token_staleness(batch, settings)) for batch in learner.batches) == 3
    with pytest.raises(ValueError, match="'max_staleness' 0 is less than 1"):
        RolloutSettings(updates_per_batch=2, max_staleness=0)


def test_tokens_of_an_engine_with_old_weights_are_never_trained():
    """It skips every other weight update: what it samples with the previous weights is stale."""
    settings = RolloutSettings(groups_per_batch=2, pipeline_depth=1, max_staleness=1)
    events = []

    class Lagging(Engine):
        def push(self, version, weights):
            self.weights[version] = weights
            if version % 2 == 0:
                self.version = version

    engine = Lagging(tokens=lambda spec, rng: 1, delay=lambda spec, rng: 0.3)
    main = learn(
        engine,
        settings,
        batches=6,
        step_s=lambda: 1.0,
        log_event=lambda kind, **more: events.append(kind),
    )
    (learner, ledger), _ = run(main)
    assert max(max(token_staleness(batch, settings)) for batch in learner.batches) <= 1
    assert "group_stale" in events and ledger.group_counts().filtered == events.count("group_stale")


def test_an_engine_that_ignores_all_weight_updates_ends_the_run():
    class IgnoresWeights(Engine):
        def push(self, version, weights):
            pass

    engine = IgnoresWeights(tokens=lambda spec, rng: 1, delay=lambda spec, rng: 0.3)
    with pytest.raises(
        RunAbortedError, match="8 consecutive groups failed, the last: stale: 2 updates old"
    ):
        run(learn(engine, RolloutSettings(groups_per_batch=2, max_staleness=1), batches=6))


def test_batches_hold_exactly_the_tokens_of_the_engine():
    engine = Engine()
    (learner, ledger), _ = run(learn(engine, RolloutSettings(groups_per_batch=2), batches=3))
    for batch in learner.batches:
        for group in batch.groups:
            for member, rollout in enumerate(group.rollouts):
                spec = RolloutSpec.derive(group.task, group.number, member, seed=0)
                for position, token in enumerate(sampled_of(rollout)):
                    version = token // BASE
                    expected = number(engine.weights[version], spec.seed, position) % BASE
                    assert token % BASE == expected
        assert batch.staleness == tuple(batch.update - g.oldest_version for g in batch.groups)
    assert content(learner.batches[0])
    assert isinstance(ledger, Ledger)
    assert sampled(learner.batches[0].groups[0])


def test_a_pipelined_trainer_does_not_wait_for_rollouts():
    """Rollouts of one second, steps of one second: run ahead, rollouts add no time."""
    even = {"tokens": lambda spec, rng: 1, "delay": lambda spec, rng: 1.0}
    settings = RolloutSettings(groups_per_batch=2, pipeline_depth=1, max_staleness=1)
    _, ahead = run(learn(Engine(**even), settings, batches=20))
    _, synchronous = run(
        learn(Engine(**even), RolloutSettings(pipeline_depth=0, max_staleness=0), batches=20)
    )
    assert (ahead, synchronous) == (21.0, 40.0)


def test_a_batch_must_be_trained_before_the_next_is_requested():
    async def twice():
        learner, _ = await learn(Engine(), RolloutSettings(), batches=1)
        collect = learner.collect
        collect._batches = 2
        await collect.next_batch()
        await collect.next_batch()

    with pytest.raises(RuntimeError, match="update 1 is not trained yet"):
        run(asyncio.wait_for(twice(), 1000))
