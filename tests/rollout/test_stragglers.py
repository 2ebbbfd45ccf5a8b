"""Rollouts that take much longer than the others of their task are named."""

import asyncio

from paddock.journal import GroupRecord
from paddock.records import Verdict
from paddock.rollout.executor import RolloutExecutor
from paddock.rollout.group import TaskSpec
from paddock.rollout.in_flight import GroupInFlight, failed_trajectory
from paddock.rollout.settings import TaskSettings
from tests.rollout.virtual_time import run

SECONDS = {"calm": [1.0, 2.0, 3.0, 5.0], "wild": [10.0, 10.0, 10.0, 99.0]}


def test_only_rollouts_beyond_three_medians_are_stragglers():
    async def main():
        async def play(spec):
            await asyncio.sleep(SECONDS[spec.task][spec.member])
            return (failed_trajectory(spec, Verdict(reward=1.0)),)

        specs = {name: TaskSpec(play, TaskSettings()) for name in SECONDS}
        ended, errors = [], []
        executor = RolloutExecutor(
            specs, seed=0, barrier=None, on_end=lambda run, _: ended.append(run), on_error=errors
        )
        executor.limit = 8
        for ordinal, name in enumerate(SECONDS):
            record = GroupRecord(ordinal=ordinal, task=name, number=0, size=4, issued=0)
            executor.start(GroupInFlight(record=record, queued=list(range(4))), 0)
        assert executor.running("wild") == 4
        found = {}
        for now in (4.0, 12.0, 31.0):
            await asyncio.sleep(now - asyncio.get_running_loop().time())
            found[now] = [(s.session_id, s.median_s) for s in executor.stragglers()]
        await asyncio.sleep(100.0)
        assert len(ended) == 8 and executor.stragglers() == []
        return found

    found, _ = run(main())
    assert found[4.0] == []  # the fourth of calm is as old as twice the median
    assert found[12.0] == []
    assert found[31.0] == [("wild-0-3", 10.0)]
