"""Simulation: how long a trainer waits for rollouts with a heavy tail, and what that costs.

    python -m benchmarks.rl_schedule

The orchestrator, the collector and the ledger are the real ones; engine, worlds and trainer are
stood in for by latencies, and time is virtual. A problem takes 20 s to 10 min (log-normal, median
50 s), attempts at it differ by a third, a training step takes a minute. An attempt can outlast
thirteen steps: with a bound of eight the trainer must wait for some, with twelve hardly ever. That
latencies do not grow with the number of attempts that run is an assumption.
No figure here is a measurement of hardware.
"""

import asyncio
from dataclasses import dataclass, field
from random import Random

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
SLOW_S = 180.0  # problems above are the slowest tenth
WAITS, DROPS = "waits, bound 12", "drops, bound 4"
MODES = {
    "synchronous": {"pipeline_depth": 0, "max_staleness": 0},
    "one step off": {"pipeline_depth": 1, "max_staleness": 1},
    "waits, bound 8": {"pipeline_depth": 4, "max_staleness": 8},
    WAITS: {"pipeline_depth": 4, "max_staleness": 12},
    DROPS: {"pipeline_depth": 4, "max_staleness": 4, "bound_by": "drop"},
    "drops, bound 12": {"pipeline_depth": 4, "max_staleness": 12, "bound_by": "drop"},
}


def problem_s(number: int) -> float:
    """How long a problem takes, typically."""
    return min(600.0, max(20.0, Random(f"problem {number}").lognormvariate(3.9, 1.0)))


@dataclass
class Worlds:
    """Attempts that only take time; the first token is written at once, the last in the end."""

    version: int = 0
    busy_s: float = 0.0

    async def __call__(self, given: RolloutSpec) -> list[Trajectory]:
        first = self.version
        seconds = problem_s(given.number) * Random(given.seed).uniform(0.67, 1.33)
        await asyncio.sleep(seconds)
        self.busy_s += seconds
        versions = [first, self.version]
        return [trajectory(given, versions, versions, Verdict(reward=1.0))]


@dataclass
class Found:
    seconds: float = 0.0
    waited_s: float = 0.0
    lags: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)  # of problems trained
    issued: int = 0
    dropped: int = 0

    @property
    def idle(self) -> float:
        return self.waited_s / self.seconds

    @property
    def slow_share(self) -> float:
        """Of what was trained, the slowest tenth of problems."""
        return sum(problem_s(n) > SLOW_S for n in self.numbers) / len(self.numbers)


async def simulate(pace: RolloutSettings) -> Found:
    worlds, ledger, found = Worlds(), Ledger(":memory:"), Found()
    work = TaskSpec(worlds, TaskSettings(group_size=SIZE, attempt_timeout_s=3600.0))
    loop = asyncio.get_running_loop()
    async with LiveBatchSource(Orchestrator({"agents": work}, pace, ledger, seed=0)) as collect:
        warm_s = 0.0
        for update in range(UPDATES + 10):
            batch = await collect.next_batch()
            assert batch is not None
            await collect.await_or_fail(asyncio.sleep(STEP_S))
            collect.mark_trained(batch)
            worlds.version = update + 1
            collect.mark_published(update + 1)
            if update == 9:  # the pipeline is full now
                warm_s = loop.time()
            if update >= 10:
                found.waited_s += batch.wait_s
                found.lags += batch.staleness
                found.numbers += [group.number for group in batch.groups]
        found.seconds = loop.time() - warm_s
    balance = ledger.group_counts()
    found.issued, found.dropped = balance.issued, balance.filtered
    return found


def every_mode() -> dict[str, Found]:
    settings = {"batch_groups": GROUPS, "concurrency": 512}
    return {
        name: run(simulate(RolloutSettings(**{**settings, **mode})))[0]
        for name, mode in MODES.items()
    }


def show(found: dict[str, Found]) -> None:
    table = Table(
        "simulated",
        "s an update",
        "trainer idle",
        "speed-up",
        "staleness mean, max",
        "groups dropped",
        "slow problems",
        title=f"{UPDATES} updates of {GROUPS} x {SIZE}",
    )
    base = found["synchronous"].seconds
    for name, one in found.items():
        table.add_row(
            name,
            f"{one.seconds / UPDATES:.0f}",
            f"{one.idle:.1%}",
            f"{base / one.seconds:.2f}x",
            f"{sum(one.lags) / len(one.lags):.1f}, {max(one.lags)}",
            f"{one.dropped / one.issued:.1%}",
            f"{one.slow_share:.1%}",
        )
    Console(width=120).print(table)


def claims() -> list[Claim]:
    found = every_mode()
    show(found)
    base, ours, drops = (found[name] for name in ("synchronous", WAITS, DROPS))
    speed_up = base.seconds / ours.seconds
    return [
        Claim(
            name="simulation: trainer idle on a heavy-tailed trace, bound 12, waiting",
            target="< 5 %",
            measured=f"{ours.idle:.1%} (synchronous {base.idle:.1%}, dropping {drops.idle:.1%})",
            holds=ours.idle < 0.05,
        ),
        Claim(
            name="simulation: speed-up over the synchronous loop",
            target=">= 2x",
            measured=f"{speed_up:.2f}x (dropping {base.seconds / drops.seconds:.2f}x)",
            holds=speed_up >= 2,
        ),
        Claim(
            name="simulation: groups thrown away",
            target="0",
            measured=f"{ours.dropped} of {ours.issued}"
            f" (dropping {drops.dropped} of {drops.issued})",
            holds=ours.dropped == 0,
        ),
        Claim(
            name="simulation: share of slow problems among those trained",
            target="that of the synchronous loop, within a tenth of it",
            measured=f"{ours.slow_share:.1%} (synchronous {base.slow_share:.1%},"
            f" dropping {drops.slow_share:.1%})",
            holds=abs(ours.slow_share - base.slow_share) <= 0.1 * base.slow_share,
        ),
    ]


if __name__ == "__main__":
    show(every_mode())
