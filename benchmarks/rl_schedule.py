"""Simulation: trainer idle time with heavy-tailed rollouts under synchronous and asynchronous RL.

    python -m benchmarks.rl_schedule

Orchestrator, batch source and ledger are the real ones; engine, environments and trainer are
replaced by latencies, and time is virtual. A task takes 20 s to 10 min (log-normal, median 50 s),
its rollouts vary by a third, a training step takes a minute. A rollout can outlast thirteen steps:
with max_staleness 8 the trainer must wait for some, with 12 hardly ever. Latencies are assumed not
to grow with the number of concurrent rollouts. No number here is a measurement of hardware.
"""

import asyncio
from dataclasses import dataclass, field
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.table import Claim
from paddock.journal import Ledger
from paddock.records import Trajectory, Verdict
from paddock.rl.live_batches import LiveBatchSource
from paddock.rollout.orchestrator import Orchestrator, TaskSpec
from paddock.rollout.settings import RolloutSettings, TaskSettings
from paddock.rollout.task_schedule import RolloutSpec
from tests.rollout.virtual_time import run, trajectory

UPDATES = 80
STEP_S = 60.0
GROUPS, SIZE = 16, 4
SLOW_S = 180.0  # tasks above are the slowest tenth
WAITS, DROPS = "wait, max staleness 12", "drop, max staleness 4"
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {"pipeline_depth": 0, "max_staleness": 0},
    "one step off": {"pipeline_depth": 1, "max_staleness": 1},
    "wait, max staleness 8": {"pipeline_depth": 4, "max_staleness": 8},
    WAITS: {"pipeline_depth": 4, "max_staleness": 12},
    DROPS: {"pipeline_depth": 4, "max_staleness": 4, "on_stale": "drop"},
    "drop, max staleness 12": {"pipeline_depth": 4, "max_staleness": 12, "on_stale": "drop"},
}


def task_s(number: int) -> float:
    """Typical seconds of a task."""
    return min(600.0, max(20.0, Random(f"problem {number}").lognormvariate(3.9, 1.0)))


@dataclass
class SimulatedRollouts:
    """Rollouts that only take time: first token at the start, last token at the end."""

    version: int = 0
    busy_s: float = 0.0

    async def __call__(self, spec: RolloutSpec) -> list[Trajectory]:
        first = self.version
        seconds = task_s(spec.number) * Random(spec.seed).uniform(0.67, 1.33)
        await asyncio.sleep(seconds)
        self.busy_s += seconds
        versions = [first, self.version]
        return [trajectory(spec, versions, versions, Verdict(reward=1.0))]


@dataclass
class SimulationResult:
    seconds: float = 0.0
    waited_s: float = 0.0
    staleness: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)  # of trained tasks
    issued: int = 0
    dropped: int = 0

    @property
    def idle(self) -> float:
        return self.waited_s / self.seconds

    @property
    def slow_share(self) -> float:
        """Share of the slowest tenth of tasks among the trained ones."""
        return sum(task_s(n) > SLOW_S for n in self.numbers) / len(self.numbers)


async def simulate(settings: RolloutSettings) -> SimulationResult:
    rollouts, ledger, found = SimulatedRollouts(), Ledger(":memory:"), SimulationResult()
    task = TaskSpec(rollouts, TaskSettings(group_size=SIZE, attempt_timeout_s=3600.0))
    loop = asyncio.get_running_loop()
    async with LiveBatchSource(Orchestrator({"agents": task}, settings, ledger, seed=0)) as batches:
        warm_s = 0.0
        for update in range(UPDATES + 10):
            batch = await batches.next_batch()
            assert batch is not None
            await batches.await_or_fail(asyncio.sleep(STEP_S))
            batches.mark_trained(batch)
            rollouts.version = update + 1
            batches.mark_published(update + 1)
            if update == 9:  # the pipeline is full now
                warm_s = loop.time()
            if update >= 10:
                found.waited_s += batch.wait_s
                found.staleness += batch.staleness
                found.numbers += [group.number for group in batch.groups]
        found.seconds = loop.time() - warm_s
    counts = ledger.group_counts()
    found.issued, found.dropped = counts.issued, counts.filtered
    return found


def simulate_all() -> dict[str, SimulationResult]:
    settings = {"groups_per_batch": GROUPS, "max_concurrent": 512}
    return {
        name: run(simulate(RolloutSettings(**{**settings, **mode})))[0]
        for name, mode in MODES.items()
    }


def show(found: dict[str, SimulationResult]) -> None:
    table = Table(
        "mode",
        "s/update",
        "trainer idle",
        "speed-up",
        "staleness mean, max",
        "groups dropped",
        "slow tasks",
        title=f"{UPDATES} updates of {GROUPS} x {SIZE}",
    )
    base = found["synchronous"].seconds
    for name, one in found.items():
        table.add_row(
            name,
            f"{one.seconds / UPDATES:.0f}",
            f"{one.idle:.1%}",
            f"{base / one.seconds:.2f}x",
            f"{sum(one.staleness) / len(one.staleness):.1f}, {max(one.staleness)}",
            f"{one.dropped / one.issued:.1%}",
            f"{one.slow_share:.1%}",
        )
    Console(width=120).print(table)


def claims() -> list[Claim]:
    found = simulate_all()
    show(found)
    base, ours, drops = (found[name] for name in ("synchronous", WAITS, DROPS))
    speed_up = base.seconds / ours.seconds
    return [
        Claim(
            name="simulation: trainer idle on a heavy-tailed trace, max staleness 12, waiting",
            target="< 5 %",
            measured=f"{ours.idle:.1%} (synchronous {base.idle:.1%}, dropping {drops.idle:.1%})",
            holds=ours.idle < 0.05,
        ),
        Claim(
            name="simulation: speed-up over synchronous",
            target=">= 2x",
            measured=f"{speed_up:.2f}x (dropping {base.seconds / drops.seconds:.2f}x)",
            holds=speed_up >= 2,
        ),
        Claim(
            name="simulation: dropped groups",
            target="0",
            measured=f"{ours.dropped} of {ours.issued}"
            f" (dropping {drops.dropped} of {drops.issued})",
            holds=ours.dropped == 0,
        ),
        Claim(
            name="simulation: share of slow tasks among trained ones",
            target="that of synchronous, within a tenth",
            measured=f"{ours.slow_share:.1%} (synchronous {base.slow_share:.1%},"
            f" dropping {drops.slow_share:.1%})",
            holds=abs(ours.slow_share - base.slow_share) <= 0.1 * base.slow_share,
        ),
    ]


if __name__ == "__main__":
    show(simulate_all())
