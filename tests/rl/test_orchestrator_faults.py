"""Orchestrator: failures of environments and engines, timeouts, stalls and bugs."""

import asyncio

import pytest

from paddock.journal import Ledger
from paddock.records import Verdict
from paddock.rl.live_batches import LiveBatchSource, RolloutStalledError
from paddock.rollout.concurrency import EngineLoad
from paddock.rollout.orchestrator import Orchestrator, TaskSpec
from paddock.rollout.settings import RolloutSettings, TaskSettings
from tests.rollout.virtual_time import FAILURES, Engine, Learner, learn, run


@pytest.mark.parametrize("kind", FAILURES)
def test_every_kind_of_failure_has_its_own_reason_and_no_reward(kind):
    """A third of all rollouts fail: a group with more than half valid is trained and lists the
    failed ones; any other group fails with the reason."""
    failure = FAILURES[kind]
    engine = Engine(
        outcome=lambda spec, rng: failure if rng.random() < 0.35 else Verdict(reward=1.0)
    )
    tasks = {"sums": TaskSettings(group_size=4, max_consecutive_failed=50)}
    (learner, ledger), _ = run(
        learn(engine, RolloutSettings(groups_per_batch=4), batches=6, tasks=tasks)
    )
    for batch in learner.batches:
        for group in batch.groups:
            assert sum(outcome == failure for outcome in group.outcomes) <= 1
    partly = sum(failure in g.outcomes for b in learner.batches for g in b.groups)
    assert partly > 3
    reasons = {entry.reason for entry in ledger.groups("failed")}
    expected = {f"{n} of 4 rollouts failed: {failure.label} ({n})" for n in (2, 3, 4)}
    assert reasons and reasons <= expected
    assert set(ledger.failure_counts()) == {("sums", kind, failure.where)}


def test_a_rollout_that_never_ends_is_a_timeout():
    hung = asyncio.Event()
    engine = Engine()

    async def rollout(spec):
        if spec.number == 1 and spec.member == 0:
            try:
                await hung.wait()
            except asyncio.CancelledError:
                await asyncio.sleep(1e6)  # and ignores cancellation
        return await engine(spec)

    ledger = Ledger(":memory:")

    async def main():
        work = TaskSpec(rollout, TaskSettings(group_size=1, attempt_timeout_s=100.0))
        settings = RolloutSettings(groups_per_batch=2, pipeline_depth=0, max_staleness=0)
        async with LiveBatchSource(
            Orchestrator({"sums": work}, settings, ledger, seed=0)
        ) as collect:
            return await Learner(collect, engine).run(2)

    learner, _ = run(main())
    assert [[g.number for g in b.groups] for b in learner.batches] == [[0, 2], [3, 4]]
    (found,) = ledger.rollouts(1).values()
    assert found[0].outcome.kind == "time"
    assert found[0].outcome.what == "over 100 s, and did not stop within 5 s of being cancelled"


def test_the_rollout_that_stalls_a_batch_is_named():
    engine = Engine(delay=lambda spec, rng: 300.0 if spec.number == 3 else 0.1)
    events = []

    async def main():
        task_specs = {"sums": TaskSpec(engine, TaskSettings(group_size=2))}
        log_event = lambda kind, **more: events.append((kind, more))  # noqa: E731
        settings = RolloutSettings(
            groups_per_batch=4, pipeline_depth=0, max_staleness=0, stall_timeout_s=30.0
        )
        orchestrator = Orchestrator(task_specs, settings, Ledger(":memory:"), seed=0)
        async with LiveBatchSource(orchestrator, log_event=log_event) as collect:
            return await Learner(collect, engine).run(1)

    run(main())
    kind, more = events[0]
    assert kind == "rollouts_stalled" and more["seconds"] >= 30
    assert more["why"].startswith("running sums-3-") and "the batch needs groups 3" in more["why"]


def test_a_deadlock_is_reported_at_once():
    async def main():
        task_specs = {"sums": TaskSpec(Engine(), TaskSettings())}
        orchestrator = Orchestrator(task_specs, RolloutSettings(), Ledger(":memory:"), seed=0)
        orchestrator.executor.limit = 0
        async with LiveBatchSource(orchestrator) as collect:
            await collect.next_batch()

    with pytest.raises(
        RolloutStalledError, match=r"no rollout is running and none may start: .*of sums"
    ):
        run(main())


class Bug(Exception):
    pass


@pytest.mark.parametrize("where", ["rollout", "sift", "trajectory", "pressure"])
@pytest.mark.parametrize("during", ["rollout", "training"])
def test_a_bug_ends_the_run_at_once_with_its_own_traceback(where, during):
    engine = Engine(tokens=lambda spec, rng: 1, delay=lambda spec, rng: 1.0)
    bad = 5 if during == "training" else 1

    async def rollout(spec):
        branches = await engine(spec)
        if where == "rollout" and spec.number == bad:
            raise Bug
        return [] if where == "trajectory" and spec.number == bad else branches

    def sift(group):
        if where == "sift" and group.number == bad:
            raise Bug
        return ""

    looks = 0

    async def pressure():
        nonlocal looks
        looks += 1
        if where == "pressure" and looks > (2 if during == "training" else 0):
            raise Bug
        return EngineLoad(kv_cache_usage=0.1)

    async def main():
        work = TaskSpec(rollout, TaskSettings(group_size=2), sift)
        orchestrator = Orchestrator(
            {"sums": work}, RolloutSettings(groups_per_batch=4), Ledger(":memory:"), seed=0
        )
        async with LiveBatchSource(orchestrator, pressure=pressure) as collect:
            learner = Learner(collect, engine, step_s=lambda: 1000.0)
            await asyncio.wait_for(learner.run(5), 50)

    with pytest.raises((Bug, ValueError)) as caught:
        run(main())
    names = [entry.name for entry in caught.traceback]
    assert {"rollout": "rollout", "sift": "sift", "trajectory": "_checked", "pressure": "pressure"}[
        where
    ] in names


def test_running_rollouts_are_cancelled_at_the_end_and_stay_in_flight():
    engine = Engine(delay=lambda spec, rng: 1.0)
    closed = []

    async def rollout(spec):
        try:
            return await engine(spec)
        finally:
            closed.append(spec.session_id)

    ledger = Ledger(":memory:")

    async def main():
        work = TaskSpec(rollout, TaskSettings(group_size=2))
        settings = RolloutSettings(groups_per_batch=2, pipeline_depth=2, max_staleness=3)
        async with LiveBatchSource(
            Orchestrator({"sums": work}, settings, ledger, seed=0)
        ) as collect:
            await Learner(collect, engine).run(2)
        assert len(asyncio.all_tasks()) == 1

    run(main())
    balance = ledger.group_counts()
    assert balance.in_flight > 0 and balance.is_consistent
    assert len(closed) == len(set(closed))
