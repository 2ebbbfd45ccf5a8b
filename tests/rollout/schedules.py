"""Adversarial schedules: settings, latencies and trainers that fit badly together."""

from random import Random

from paddock.rollout.settings import RolloutSettings, TaskSettings
from tests.rollout.virtual_time import BASE, Engine, sampled

DELAYS = {
    "even": lambda spec, rng: rng.uniform(0.5, 1.5),
    "heavy tail": lambda spec, rng: 0.3 * rng.paretovariate(1.1),
    "one in ten hangs": lambda spec, rng: 40.0 if rng.random() < 0.1 else 0.1,
    "one task crawls": lambda spec, rng: 10.0 if spec.task == "t1" else 0.2,
    "every fifth problem": lambda spec, rng: 20.0 if spec.number % 5 == 0 else 0.1,
}


def schedule(n, **fixed):
    """Rollout settings, tasks, engine and step time of the n-th schedule."""
    rng = Random(n)
    updates, every = rng.choice([1, 1, 1, 2, 3]), rng.choice([1, 1, 2, 3])
    fresh = -(-every // updates) * updates - 1  # the staleness of a synchronous loop
    settings = {
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
    settings["ratio_unit"] = rng.choice(["groups", "tokens"])
    return RolloutSettings(**{**settings, **fixed}), tasks, engine, lambda: step_s * rng.random()


def token_staleness(batch, settings):
    """Staleness of every token of a batch at the last update that trains it, read off the token."""
    last = batch.update + settings.updates_per_batch - 1
    return [last - token // BASE for group in batch.groups for token in sampled(group)]
