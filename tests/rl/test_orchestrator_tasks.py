"""Many tasks: ratios, failures, budgets, crowds."""

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
        tokens=lambda given, rng: 1,
        delay=lambda given, rng: rng.uniform(0.5, 1.5) * SKEWED[given.task],
        **more,
    )
    return tasks, engine


@pytest.mark.parametrize("bound_by", ["wait", "drop"])
def test_ratios_hold_though_one_task_is_ten_times_slower(bound_by):
    tasks, engine = skewed()
    pace = RolloutSettings(groups_per_batch=7, pipeline_depth=3, max_staleness=6, on_stale=bound_by)
    (learner, _), _ = run(learn(engine, pace, batches=60, tasks=tasks))
    counts = trained(learner)
    for task, ratio in RATIOS.items():
        assert abs(counts[task] / counts.total() - ratio) < 0.005
        for batch in learner.batches:  # and in every batch, to the group
            here = sum(group.task == task for group in batch.groups)
            assert abs(here - 7 * ratio) <= 1


@pytest.mark.parametrize("depth", [0, 2])
def test_other_ratios_hold_from_the_next_batch_on(depth):
    tasks, engine = skewed()
    pace = RolloutSettings(groups_per_batch=10, pipeline_depth=depth, max_staleness=6)

    async def main():
        works = {name: TaskSpec(engine, settings) for name, settings in tasks.items()}
        ledger = Ledger(":memory:")
        async with LiveBatchSource(Orchestrator(works, pace, ledger, seed=0)) as collect:
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
    # What was begun for the others is not thrown away: it is trained before it is too old.
    assert after[10]["fast"] == 10
    assert all(batch == {"fast": 10} for batch in after[20:])
    assert ledger.group_counts().filtered == 0


def test_ratios_of_tasks_that_do_not_exist_are_refused():
    tasks, engine = skewed()

    async def main(ratios):
        works = {name: TaskSpec(engine, settings) for name, settings in tasks.items()}
        orchestrator = Orchestrator(works, RolloutSettings(), Ledger(":memory:"), seed=0)
        collect = LiveBatchSource(orchestrator)
        collect.resume(0)
        collect.set_ratios(ratios)

    with pytest.raises(TaskRatioError, match="'quick' in ratios; must be one of fast"):
        run(main({"quick": 1.0}))
    with pytest.raises(TaskRatioError, match="at least one ratio must be positive"):
        run(main({"fast": 0.0}))
    with pytest.raises(TaskRatioError, match="of 'slow' must be finite"):
        run(main({"slow": float("nan")}))


def test_a_task_that_is_down_is_set_aside_and_tried_again():
    """The others go on at their shares, and it gets its own back when it works again."""
    tasks, engine = skewed()
    tasks["slow"] = TaskSettings(group_size=2, ratio=0.2, max_consecutive_failed=4)
    down = {"slow"}
    engine.outcome = lambda given, rng: (
        FAILURES["infrastructure"] if given.task in down else Verdict(reward=rng.random())
    )
    told = []
    pace = RolloutSettings(groups_per_batch=8, pipeline_depth=1, max_staleness=2)

    async def main():
        works = {name: TaskSpec(engine, settings) for name, settings in tasks.items()}
        tell = lambda kind, **more: told.append((kind, more))  # noqa: E731
        orchestrator = Orchestrator(works, pace, Ledger(":memory:"), seed=0, log_event=tell)
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
    assert failed > 4  # it was tried again meanwhile
    assert back.disabled_reason == ""
    assert [kind for kind, _ in told] == ["task_disabled", "task_enabled"]


def test_a_task_that_cannot_be_done_without_ends_the_run():
    tasks, engine = skewed(outcome=lambda given, rng: FAILURES["world"])
    tasks = {"fast": tasks["fast"], "slow": TaskSettings(required=True, max_consecutive_failed=3)}
    with pytest.raises(
        RunAbortedError, match="required task 'slow' failed: 3 consecutive groups failed"
    ):
        run(learn(engine, RolloutSettings(), batches=5, tasks=tasks))


def test_when_no_task_is_left_the_run_ends_with_the_reasons():
    tasks, engine = skewed(outcome=lambda given, rng: FAILURES["grader"])
    with pytest.raises(
        RunAbortedError, match=r"no task is left to train on: fast: \d+ consecutive groups"
    ):
        run(learn(engine, RolloutSettings(groups_per_batch=4), batches=5, tasks=tasks))


@pytest.mark.parametrize("depth", [0, 3])
def test_a_flood_of_groups_without_spread_ends_the_run_and_does_not_hang_it(depth):
    pace = RolloutSettings(groups_per_batch=4, pipeline_depth=depth, max_staleness=depth)
    settings = TaskSettings(group_size=3, max_consecutive_filtered=20)
    ledger = Ledger(":memory:")

    async def main():
        work = TaskSpec(Engine(), settings, lambda group: "zero variance")
        orchestrator = Orchestrator({"sums": work}, pace, ledger, seed=0)
        async with LiveBatchSource(orchestrator) as collect:
            await collect.next_batch()

    with pytest.raises(
        RunAbortedError, match="sums: 20 consecutive groups were filtered: zero variance"
    ):
        run(main())
    assert ledger.group_counts().filtered == 20 and ledger.group_counts().is_consistent


def test_some_groups_without_spread_are_refilled():
    pace = RolloutSettings(groups_per_batch=4, pipeline_depth=1, max_staleness=1)
    ledger = Ledger(":memory:")

    async def main():
        flat = lambda group: "zero variance" if group.number % 3 == 0 else ""  # noqa: E731
        work = TaskSpec(Engine(), TaskSettings(group_size=2), flat)
        async with LiveBatchSource(Orchestrator({"sums": work}, pace, ledger, seed=0)) as collect:
            return await Learner(collect, work.rollout_fn).run(9)

    learner, _ = run(main())
    assert [len(batch.groups) for batch in learner.batches] == [4] * 9
    assert all(group.number % 3 for batch in learner.batches for group in batch.groups)
    assert ledger.counts_by_reason()["sums", "filtered", "zero variance"] >= 18


def test_two_thousand_attempts_of_eight_tasks_run_at_once():
    most = now = 0
    engine = Engine(
        tokens=lambda given, rng: 2,
        delay=lambda given, rng: rng.paretovariate(1.5) * (1 + int(given.task[1])),
    )

    async def attempt(given):
        nonlocal most, now
        now += 1
        most = max(most, now)
        try:
            return await engine(given)
        finally:
            now -= 1

    async def main():
        works = {
            f"t{i}": TaskSpec(attempt, TaskSettings(group_size=8, ratio=1.0 + i % 3))
            for i in range(8)
        }
        pace = RolloutSettings(
            groups_per_batch=64, pipeline_depth=4, max_staleness=8, max_concurrent=2000
        )
        async with LiveBatchSource(
            Orchestrator(works, pace, Ledger(":memory:"), seed=0)
        ) as collect:
            return await Learner(collect, engine, step_s=lambda: 5.0).run(4)

    learner, _ = run(main())
    assert most == 2000
    counts = trained(learner)
    weights = {f"t{i}": 1.0 + i % 3 for i in range(8)}
    for task, weight in weights.items():
        assert abs(counts[task] - counts.total() * weight / sum(weights.values())) <= 1


def test_a_slow_trainer_does_not_fill_the_memory():
    """However long a step takes, no more groups are alive than the pipeline holds."""
    engine = Engine(tokens=lambda given, rng: 1, delay=lambda given, rng: 0.001)
    alive = []

    async def main():
        work = TaskSpec(engine, TaskSettings(group_size=4))
        pace = RolloutSettings(groups_per_batch=4, pipeline_depth=2, max_staleness=8)
        orchestrator = Orchestrator({"sums": work}, pace, Ledger(":memory:"), seed=0)
        async with LiveBatchSource(orchestrator) as collect:
            learner = Learner(collect, engine, step_s=lambda: 500.0)
            learner.save = lambda *_: alive.append(len(orchestrator.live_groups()))
            return await learner.run(20)

    run(main())
    assert alive == [8] * 20


def test_a_task_never_has_more_attempts_than_its_own_limit():
    tasks = {"a": TaskSettings(group_size=4, max_concurrent=3), "b": TaskSettings(group_size=4)}
    now, most = Counter(), Counter()
    engine = Engine()

    async def attempt(given):
        now[given.task] += 1
        most[given.task] = max(most[given.task], now[given.task])
        try:
            return await engine(given)
        finally:
            now[given.task] -= 1

    async def main():
        works = {name: TaskSpec(attempt, settings) for name, settings in tasks.items()}
        pace = RolloutSettings(groups_per_batch=8, max_concurrent=20)
        async with LiveBatchSource(
            Orchestrator(works, pace, Ledger(":memory:"), seed=0)
        ) as collect:
            await Learner(collect, engine).run(5)

    run(main())
    assert most["a"] == 3 and most["b"] > 10


def test_attempts_follow_the_room_in_the_engine():
    """An engine with room for 40: the limit finds it, and slots are filled again as they fall
    free."""
    room, running, peaks = 40, 0, []
    engine = Engine(delay=lambda given, rng: rng.uniform(0.5, 1.5))

    async def attempt(given):
        nonlocal running
        running += 1
        try:
            return await engine(given)
        finally:
            running -= 1

    async def pressure():
        peaks.append(running)
        return EngineLoad(kv_cache_usage=min(1.0, running / room), waiting=max(0, running - room))

    async def main():
        work = TaskSpec(attempt, TaskSettings(group_size=8))
        pace = RolloutSettings(
            groups_per_batch=32, pipeline_depth=4, max_staleness=8, max_concurrent=400
        )
        orchestrator = Orchestrator({"sums": work}, pace, Ledger(":memory:"), seed=0)
        async with LiveBatchSource(orchestrator, pressure=pressure) as collect:
            await Learner(collect, engine).run(5)

    run(main())
    settled = peaks[10:-10]
    assert 25 < sum(settled) / len(settled) < 50
    assert max(settled) < 80
