"""Task ratios as shares of tokens or seconds: reached, kept when tasks change, exact on resume."""

from collections import Counter

import pytest

from paddock.cli.rl import run_rl
from paddock.journal import Ledger
from paddock.launch.rollouts import LEDGER_FILE
from paddock.rl.live_batches import LiveBatchSource
from paddock.rollout.deterministic import RequestBarrier
from paddock.rollout.orchestrator import Orchestrator, TaskSpec
from paddock.rollout.settings import RolloutSettings, TaskSettings
from tests.rl.vault_runs import RECIPE, numbers, recipe_in
from tests.rollout.virtual_time import Engine, Learner, content, learn, run, sampled

LENGTHS = {"short": 4, "long": 32}  # tokens of a reply, on average
TASKS = {"short": TaskSettings(group_size=2, ratio=2.0), "long": TaskSettings(group_size=2)}


def engine(**more):
    """Replies of one task are eight times as long; each token takes a second."""
    return Engine(
        tokens=lambda spec, rng: max(1, round(LENGTHS[spec.task] * rng.uniform(0.3, 1.7))),
        **{"delay": lambda spec, rng: 1.0, **more},
    )


def tokens(batches):
    found = Counter()
    for batch in batches:
        for group in batch.groups:
            found[group.task] += len(sampled(group))
    return found


def share(counts):
    return counts["short"] / counts.total()


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
@pytest.mark.parametrize(("depth", "staleness"), [(0, 0), (3, 6)])
def test_tokens_reach_their_share_with_replies_of_one_to_eight(depth, staleness, on_stale):
    settings = RolloutSettings(
        groups_per_batch=6,
        pipeline_depth=depth,
        max_staleness=staleness,
        on_stale=on_stale,
        ratio_unit="tokens",
    )
    (learner, _), _ = run(learn(engine(), settings, batches=80, tasks=TASKS))
    assert share(tokens(learner.batches)) == pytest.approx(2 / 3, abs=0.02)
    assert share(tokens(learner.batches[60:])) == pytest.approx(2 / 3, abs=0.06)
    groups = Counter(group.task for batch in learner.batches for group in batch.groups)
    assert groups["short"] / groups["long"] == pytest.approx(16, rel=0.15)


def test_seconds_reach_their_share_with_equal_lengths():
    """The tokens of one task take eight times as long."""
    slow = Engine(tokens=lambda s, r: 4, delay=lambda s, r: 1.0 if s.task == "short" else 8.0)
    settings = RolloutSettings(
        groups_per_batch=6, pipeline_depth=1, max_staleness=4, ratio_unit="seconds"
    )
    (learner, ledger), _ = run(learn(slow, settings, batches=60, tasks=TASKS))
    seconds = Counter()
    for batch in learner.batches:
        for group in batch.groups:
            seconds[group.task] += ledger.group_cost(group.ordinal, "seconds")
    assert share(seconds) == pytest.approx(2 / 3, abs=0.02)


def test_the_share_holds_while_replies_grow():
    """As a model learns to think longer: the estimate follows, and what was taken is counted."""
    growing = engine()
    growing.tokens = lambda spec, rng: 4 if spec.task == "short" else min(60, 4 + spec.number * 2)
    settings = RolloutSettings(groups_per_batch=6, max_staleness=2, ratio_unit="tokens")
    (learner, _), _ = run(learn(growing, settings, batches=80, tasks=TASKS))
    assert share(tokens(learner.batches)) == pytest.approx(2 / 3, abs=0.03)


def test_a_resumed_run_takes_the_same_tasks(tmp_path):
    settings = RolloutSettings(
        groups_per_batch=5,
        pipeline_depth=1,
        max_staleness=2,
        ratio_unit="tokens",
        deterministic=True,
        order="in_order",
    )

    def process(path, learner, batches):
        """One process: resumes after the updates that `learner` has done."""

        async def main():
            barrier = RequestBarrier()
            replies = engine(barrier=barrier)
            replies.push(learner.updates, learner.weights)
            specs = {name: TaskSpec(replies, task) for name, task in TASKS.items()}
            with Ledger(path) as ledger:
                orchestrator = Orchestrator(specs, settings, ledger, seed=3, barrier=barrier)
                async with LiveBatchSource(orchestrator, batches=12) as collect:
                    collect.resume(learner.updates)
                    learner.collect, learner.engine = collect, replies
                    await learner.run(batches)

        run(main())
        return learner

    through = process(tmp_path / "through", Learner(None, None), 12)
    parts = process(tmp_path / "parts", Learner(None, None), 5)
    parts = process(tmp_path / "parts", parts, 7)
    assert len(parts.batches) == 12
    assert [content(batch) for batch in parts.batches] == [
        content(batch) for batch in through.batches
    ]
    assert len({share(tokens([batch])) for batch in parts.batches}) >= 3  # decisions differ


def test_seconds_are_refused_in_deterministic_mode():
    with pytest.raises(ValueError, match="which vary"):
        RolloutSettings(deterministic=True, order="in_order", ratio_unit="seconds")


def test_the_metrics_have_every_tasks_share(start, tmp_path):
    text = RECIPE.replace("[rollout]", '[tasks.other]\nenv = "vault"\ngroup_size = 2\n[rollout]')
    sets = ["steps=2", "rollout.ratio_unit=tokens", "credit.keep_zero_variance=true"]
    run_rl(recipe_in(tmp_path, start, text), tmp_path / "run", sets)
    with Ledger(tmp_path / "run" / LEDGER_FILE) as ledger:
        for update, _, groups in ledger.batches():
            counts = Counter(vault=0, other=0)
            for group in groups:
                counts[group.task] += ledger.group_cost(group.ordinal, "tokens")
            row = numbers(tmp_path / "run")[update + 1]
            for task, count in counts.items():
                assert row[f"token_share/{task}"] == pytest.approx(count / counts.total())
