"""Orchestrator with several tasks: ratios, failures, concurrency limits."""

from collections import Counter

import pytest

from paddock.journal import Ledger
from paddock.records import Verdict
from paddock.rl.live_batches import LiveBatchSource
from paddock.rollout.concurrency import EngineLoad
from paddock.rollout.orchestrator import Orchestrator, TaskSpec
from paddock.rollout.settings import RolloutSettings, TaskSettings
from paddock.rollout.task_health import RunAbortedError
from paddock.rollout.task_mixture import TaskRatioError
from tests.rollout.virtual_time import FAILURES, Engine, Learner, learn, run


def trained(learner, first=0):
    return Counter(group.task for batch in learner.batches[first:] for group in batch.groups)


SKEWED = {"fast": 0.5, "middle": 3.0, "slow": 5.0}
RATIOS = {"fast": 0.5, "middle": 0.3, "slow": 0.2}


def skewed(**more):
    tasks = {name: TaskSettings(group_size=2, ratio=RATIOS[name]) for name in RATIOS}
    engine = Engine(
        tokens=lambda spec, rng: 1,
        delay=lambda spec, rng: rng.uniform(0.5, 1.5) * SKEWED[spec.task],
        **more,
    )
    return tasks, engine


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
def test_ratios_hold_when_one_task_is_ten_times_slower(on_stale):
    tasks, engine = skewed()
    settings = RolloutSettings(
        groups_per_batch=7, pipeline_depth=3, max_staleness=6, on_stale=on_stale
    )
    (learner, _), _ = run(learn(engine, settings, batches=60, tasks=tasks))
    counts = trained(learner)
    for task, ratio in RATIOS.items():
        assert abs(counts[task] / counts.total() - ratio) < 0.005
        for batch in learner.batches:  # in every batch, exactly
            here = sum(group.task == task for group in batch.groups)
            assert abs(here - 7 * ratio) <= 1


@pytest.mark.parametrize("depth", [0, 2])
def test_new_ratios_apply_from_the_next_batch(depth):
    tasks, engine = skewed()
    settings = RolloutSettings(groups_per_batch=10, pipeline_depth=depth, max_staleness=6)

    async def main():
        task_specs = {
            name: TaskSpec(engine, task_settings) for name, task_settings in tasks.items()
        }
        ledger = Ledger(":memory:")
        async with LiveBatchSource(Orchestrator(task_specs, settings, ledger, seed=0)) as collect:
            learner = Learner(collect, engine)
            await learner.run(5)
            collect.set_ratios({"fast": 0.1, "middle": 0.1, "slow": 0.8})
            await learner.run(5)
            collect.set_ratios({"fast": 1.0})
            await learner.run(12)
        return learner, ledger

    (learner, ledger), _ = run(main())
    after = [trained(learner, n) - trained(learner, n + 1) for n in range(22)]
    assert after[4] == {"fast": 5, "middle": 3, "slow": 2}
    assert all(batch == {"fast": 1, "middle": 1, "slow": 8} for batch in after[5:10])
    # Groups already issued for the others are not dropped: they are trained before they are stale.
    assert after[10]["fast"] == 10
    assert all(batch == {"fast": 10} for batch in after[20:])
    assert ledger.group_counts().filtered == 0


def test_ratios_of_unknown_tasks_are_rejected():
    tasks, engine = skewed()

    async def main(ratios):
        task_specs = {
            name: TaskSpec(engine, task_settings) for name, task_settings in tasks.items()
        }
        orchestrator = Orchestrator(task_specs, RolloutSettings(), Ledger(":memory:"), seed=0)
        collect = LiveBatchSource(orchestrator)
        collect.resume(0)
        collect.set_ratios(ratios)

    with pytest.raises(TaskRatioError, match="'quick' in ratios; must be one of fast"):
        run(main({"quick": 1.0}))
    with pytest.raises(TaskRatioError, match="at least one ratio must be positive"):
        run(main({"fast": 0.0}))
    with pytest.raises(TaskRatioError, match="of 'slow' must be finite"):
        run(main({"slow": float("nan")}))


def test_a_failing_task_is_disabled_and_retried():
    """The other tasks keep their ratios, and it gets its own back once it works."""
    tasks, engine = skewed()
    tasks["slow"] = TaskSettings(group_size=2, ratio=0.2, max_consecutive_failed=4)
    down = {"slow"}
    engine.outcome = lambda spec, rng: (
        FAILURES["infrastructure"] if spec.task in down else Verdict(reward=rng.random())
    )
    events = []
    settings = RolloutSettings(groups_per_batch=8, pipeline_depth=1, max_staleness=2)

    async def main():
        task_specs = {
            name: TaskSpec(engine, task_settings) for name, task_settings in tasks.items()
        }
        log_event = lambda kind, **more: events.append((kind, more))  # noqa: E731
        orchestrator = Orchestrator(
            task_specs, settings, Ledger(":memory:"), seed=0, log_event=log_event
        )
        async with LiveBatchSource(orchestrator) as collect:
            learner = Learner(collect, engine)
            await learner.run(10)
            aside = collect.progress().tasks["slow"]
            down.clear()
            await learner.run(20)
            return learner, aside, collect.progress().tasks["slow"]

    (learner, aside, back), _ = run(main())
    early, late = trained(learner) - trained(learner, 10), trained(learner, 16)
    assert early["slow"] == 0 and early["fast"] == 50 and early["middle"] == 30
    assert abs(late["slow"] / late.total() - 0.2) < 0.02
    why = (
        "consecutive groups failed, the last: 2 of 2 rollouts failed: infrastructure at engine (2)"
    )
    failed = sum(aside.failed.values())
    assert aside.disabled_reason == f"{failed} {why}"
    assert failed > 4  # it was retried meanwhile
    assert back.disabled_reason == ""
    assert [kind for kind, _ in events] == ["task_disabled", "task_enabled"]


def test_a_failing_required_task_ends_the_run():
    tasks, engine = skewed(outcome=lambda spec, rng: FAILURES["world"])
    tasks = {"fast": tasks["fast"], "slow": TaskSettings(required=True, max_consecutive_failed=3)}
    with pytest.raises(
        RunAbortedError, match="required task 'slow' failed: 3 consecutive groups failed"
    ):
        run(learn(engine, RolloutSettings(), batches=5, tasks=tasks))


def test_the_run_ends_with_the_reasons_when_every_task_is_disabled():
    tasks, engine = skewed(outcome=lambda spec, rng: FAILURES["grader"])
    with pytest.raises(
        RunAbortedError, match=r"no task is left to train on: fast: \d+ consecutive groups"
    ):
        run(learn(engine, RolloutSettings(groups_per_batch=4), batches=5, tasks=tasks))


@pytest.mark.parametrize("depth", [0, 3])
def test_too_many_zero_variance_groups_end_the_run(depth):
    settings = RolloutSettings(groups_per_batch=4, pipeline_depth=depth, max_staleness=depth)
    task_settings = TaskSettings(group_size=3, max_consecutive_filtered=20)
    ledger = Ledger(":memory:")

    async def main():
        work = TaskSpec(Engine(), task_settings, lambda group: "zero variance")
        orchestrator = Orchestrator({"sums": work}, settings, ledger, seed=0)
        async with LiveBatchSource(orchestrator) as collect:
            await collect.next_batch()

    with pytest.raises(
        RunAbortedError, match="sums: 20 consecutive groups were filtered: zero variance"
    ):
        run(main())
    assert ledger.group_counts().filtered == 20 and ledger.group_counts().is_consistent


def test_zero_variance_groups_are_replaced():
    settings = RolloutSettings(groups_per_batch=4, pipeline_depth=1, max_staleness=1)
    ledger = Ledger(":memory:")

    async def main():
        flat = lambda group: "zero variance" if group.number % 3 == 0 else ""  # noqa: E731
        work = TaskSpec(Engine(), TaskSettings(group_size=2), flat)
        async with LiveBatchSource(
            Orchestrator({"sums": work}, settings, ledger, seed=0)
        ) as collect:
            return await Learner(collect, work.rollout_fn).run(9)

    learner, _ = run(main())
    assert [len(batch.groups) for batch in learner.batches] == [4] * 9
    assert all(group.number % 3 for batch in learner.batches for group in batch.groups)
    assert ledger.counts_by_reason()["sums", "filtered", "zero variance"] >= 18


def test_two_thousand_rollouts_of_eight_tasks_run_concurrently():
    peak = now = 0
    engine = Engine(
        tokens=lambda spec, rng: 2,
        delay=lambda spec, rng: rng.paretovariate(1.5) * (1 + int(spec.task[1])),
    )

    async def rollout(spec):
        nonlocal peak, now
        now += 1
        peak = max(peak, now)
        try:
            return await engine(spec)
        finally:
            now -= 1

    async def main():
        task_specs = {
            f"t{i}": TaskSpec(rollout, TaskSettings(group_size=8, ratio=1.0 + i % 3))
            for i in range(8)
        }
        settings = RolloutSettings(
            groups_per_batch=64, pipeline_depth=4, max_staleness=8, max_concurrent=2000
        )
        async with LiveBatchSource(
            Orchestrator(task_specs, settings, Ledger(":memory:"), seed=0)
        ) as collect:
            return await Learner(collect, engine, step_s=lambda: 5.0).run(4)

    learner, _ = run(main())
    assert peak == 2000
    counts = trained(learner)
    weights = {f"t{i}": 1.0 + i % 3 for i in range(8)}
    for task, weight in weights.items():
        assert abs(counts[task] - counts.total() * weight / sum(weights.values())) <= 1


def test_a_slow_trainer_bounds_the_number_of_live_groups():
    """However long a step takes, at most the groups of the pipeline are live."""
    engine = Engine(tokens=lambda spec, rng: 1, delay=lambda spec, rng: 0.001)
    alive = []

    async def main():
        work = TaskSpec(engine, TaskSettings(group_size=4))
        settings = RolloutSettings(groups_per_batch=4, pipeline_depth=2, max_staleness=8)
        orchestrator = Orchestrator({"sums": work}, settings, Ledger(":memory:"), seed=0)
        async with LiveBatchSource(orchestrator) as collect:
            learner = Learner(collect, engine, step_s=lambda: 500.0)
            learner.save = lambda *_: alive.append(len(orchestrator.live_groups()))
            return await learner.run(20)

    run(main())
    assert alive == [8] * 20


def test_a_task_never_exceeds_its_max_concurrent():
    tasks = {"a": TaskSettings(group_size=4, max_concurrent=3), "b": TaskSettings(group_size=4)}
    now, peak = Counter(), Counter()
    engine = Engine()

    async def rollout(spec):
        now[spec.task] += 1
        peak[spec.task] = max(peak[spec.task], now[spec.task])
        try:
            return await engine(spec)
        finally:
            now[spec.task] -= 1

    async def main():
        task_specs = {
            name: TaskSpec(rollout, task_settings) for name, task_settings in tasks.items()
        }
        settings = RolloutSettings(groups_per_batch=8, max_concurrent=20)
        async with LiveBatchSource(
            Orchestrator(task_specs, settings, Ledger(":memory:"), seed=0)
        ) as collect:
            await Learner(collect, engine).run(5)

    run(main())
    assert peak["a"] == 3 and peak["b"] > 10


def test_concurrency_follows_the_kv_cache_of_the_engine():
    """An engine with a capacity of 40: the concurrency limit converges to it."""
    capacity, running, peaks = 40, 0, []
    engine = Engine(delay=lambda spec, rng: rng.uniform(0.5, 1.5))

    async def rollout(spec):
        nonlocal running
        running += 1
        try:
            return await engine(spec)
        finally:
            running -= 1

    async def pressure():
        peaks.append(running)
        return EngineLoad(
            kv_cache_usage=min(1.0, running / capacity), waiting=max(0, running - capacity)
        )

    async def main():
        work = TaskSpec(rollout, TaskSettings(group_size=8))
        settings = RolloutSettings(
            groups_per_batch=32, pipeline_depth=4, max_staleness=8, max_concurrent=400
        )
        orchestrator = Orchestrator({"sums": work}, settings, Ledger(":memory:"), seed=0)
        async with LiveBatchSource(orchestrator, pressure=pressure) as collect:
            await Learner(collect, engine).run(5)

    run(main())
    settled = peaks[10:-10]
    assert 25 < sum(settled) / len(settled) < 50
    assert max(settled) < 80
