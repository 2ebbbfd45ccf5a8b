"""Adversarial schedules: settings, latencies and trainers that fit badly together."""

from random import Random

from paddock.rollout.settings import RolloutSettings, TaskSettings
from tests.rollout.virtual_time import BASE, Engine, sampled

DELAYS = {
    "even": lambda given, rng: rng.uniform(0.5, 1.5),
    "heavy tail": lambda given, rng: 0.3 * rng.paretovariate(1.1),
    "one in ten hangs": lambda given, rng: 40.0 if rng.random() < 0.1 else 0.1,
    "one task crawls": lambda given, rng: 10.0 if given.task == "t1" else 0.2,
    "every fifth problem": lambda given, rng: 20.0 if given.number % 5 == 0 else 0.1,
}


def schedule(n, **fixed):
    """Pace, tasks, engine and the trainer's pace of the n-th schedule."""
    rng = Random(n)
    updates, every = rng.choice([1, 1, 1, 2, 3]), rng.choice([1, 1, 2, 3])
    fresh = -(-every // updates) * updates - 1  # what even a synchronous loop reaches
    pace = {
        "groups_per_batch": rng.randint(1, 3),
        "pipeline_depth": rng.randint(0, 3),
        "max_staleness": fresh + rng.randint(0, 4),
        "on_stale": rng.choice(["wait", "drop"]),
        "order": rng.choice(["oldest_first", "in_order"]),
        "updates_per_batch": updates,
        "sync_weights_every": every,
        "max_concurrent": rng.choice([1, 2, 5, 100]),
        "min_concurrent": 1,
    }
    tasks = {
        f"t{i}": TaskSettings(group_size=rng.randint(1, 2), ratio=rng.choice([1.0, 2.0, 0.5]))
        for i in range(rng.randint(1, 3))
    }
    engine = Engine(delay=rng.choice(list(DELAYS.values())), seed=n)
    step_s = rng.choice([0.01, 1.0, 10.0])
    engine.eager = rng.random() < 0.5
    return RolloutSettings(**{**pace, **fixed}), tasks, engine, lambda: step_s * rng.random()


def lags(batch, pace):
    """Of every token of a batch, read off the token itself: how many updates it is behind at the
    last update that trains it."""
    last = batch.update + pace.updates_per_batch - 1
    return [last - token // BASE for group in batch.groups for token in sampled(group)]
