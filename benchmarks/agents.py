"""Agents in other processes: trained through the gateway, killed, and as wild as can be generated.

    python -m benchmarks.agents [--only NAME]

The model is the small one of tests/rl/vault_env.py, pretrained in seconds: an agent must call a
tool before it reports that it is done; or nano, from runs/nano/sparse (made if it is not there).
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest

from benchmarks.rl_learn import fine_tune, paddock
from benchmarks.table import Claim, print_claims
from paddock import launch
from tests.rl.hosts import why_no_hosts
from tests.rl.test_agents import killed_at_random_moments, rollouts_of
from tests.rl.test_other_hosts import trained_by_hosts
from tests.rl.test_run_fuzzed import fuzzed_run
from tests.rl.vault_env import pretrained_on_vault
from tests.rl.vault_runs import RECIPE, recipe_in, register
from tests.rollout.replay import check_replay, log_samples
from tests.rollout.test_agent_histories import CHANGES, check_agent

AGENTS, KILLS, FUZZED = 3000, 20, 30
BEFORE, AFTER = 0.3, 0.9
ROOT = Path(__file__).parents[1]
ALONE = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
NANO_BASE = "runs/nano/sparse"
NANO = """
stage = "agentic"
steps = 60
stop_at_reward = 0.95
[init]
checkpoint = "{start}"
[tasks.tools]
env = "nano-tools"
args = {{ kinds = ["plus", "search"] }}
group_size = 8
[tasks.tools.agent]
pull = true
[rollout]
groups_per_batch = 12
[optim]
type = "muon"
lr = 5e-4
weight_decay = 0.0
[compute]
threads = 1
[engines]
place = "subprocess"
[checkpoint]
every = 50
"""
TRAIN = (
    "steps=200",
    "stop_at_reward=0.95",
    "rollout.groups_per_batch=4",
    "tasks.vault.group_size=8",
    "checkpoint.every=50",
)


def claims() -> list[Claim]:
    return [made() for made in PROOFS.values()]


def histories() -> Claim:
    rng = Random(0)
    for seed in range(AGENTS):
        changes = rng.choices(CHANGES, k=rng.randint(2, 8))
        check_agent(seed, changes, rng.choice(["strict", "loose"]))
    name = "generated agents: every trained token was sampled, after its prompt, and once"
    return Claim(name=name, target="all", measured=f"all of {AGENTS:,}", holds=True)


def kills() -> Claim:
    with TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        start = _start(Path(scratch))
        found = killed_at_random_moments(start, Path(scratch), patch, kills=KILLS, steps=8)
    name = f"SIGKILL of the agent at {KILLS} random moments: groups lost, tokens not sampled"
    return Claim(name=name, target="none", measured=f"none of {found} rollouts", holds=True)


def hosts() -> Claim:
    """Workers in network namespaces: the link of one is cut six times, the other host dies."""
    name = "workers on two other hosts, a link cut 6 times for 3 s, a host that dies: groups lost"
    if why := why_no_hosts():
        return Claim(name=name, target="none", measured=f"not run: {why}")
    with TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        start = _start(Path(scratch))
        found, again = trained_by_hosts(start, Path(scratch), patch, cuts=6, steps=12)
    measured = f"none of {found} rollouts; {again} sampled turns were of lost ones"
    return Claim(name=name, target="none, and none twice", measured=measured, holds=True)


def fuzzed() -> Claim:
    with TemporaryDirectory() as scratch:
        start = _start(Path(scratch))
        count, updates = fuzzed_run(start, Path(scratch), examples=FUZZED)
    name = f"the gateway of a run, every operation fuzzed {FUZZED} times with each key, both modes"
    measured = f"{count} operations, {updates} updates of the run meanwhile"
    return Claim(name=name, target="no error, and it trains on", measured=measured, holds=True)


def learns_vault(client: str) -> Claim:
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        recipe = recipe_in(folder, _start(folder), f"{RECIPE}\n[tasks.vault.agent]\npull = true\n")
        run = train(client, recipe, folder / "run", "vault", TRAIN)
    return _reward_claim(f"the vault network, {client} client", run)


def learns_nano(client: str) -> Claim:
    """Nano, fine-tuned on demonstrations that mostly guess, in tasks of two calls or more."""
    if not Path(NANO_BASE).is_dir():
        paddock("run", "recipes/nano", "--until", Path(NANO_BASE).name)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        recipe = folder / "recipe.toml"
        recipe.write_text(NANO.format(start=fine_tune(Path(NANO_BASE), 0, folder)))
        run = train(client, recipe, folder / "run", "tools")
    print(f"{client}: reward {' '.join(f'{reward:.2f}' for reward in run.rewards)}")
    return _reward_claim(f"nano, {client} client", run)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRun:
    rewards: list[float]  # of every update
    seconds: float
    trained_turns: int  # each found in the log of what the engines sampled
    tool_turns: float  # of a rollout, mean over the last updates
    cut: float  # share of the last rollouts whose history was cut


LAST_GROUPS = 24


def train(
    client: str, recipe: Path, out: Path, task: str, overrides: Sequence[str] = ()
) -> TrainedRun:
    """Train by a worker process with the stock client and the agent of examples/."""
    worker, log = ROOT / "examples/agent_worker.py", []
    workers: list[subprocess.Popen[bytes]] = []

    class Callbacks(launch.RLCallbacks):
        def on_start(self, step: int, steps: int) -> None:  # noqa: ARG002
            words = [sys.executable, str(worker), client, str(out / "gateway.json"), task]
            workers.append(subprocess.Popen(words, env=ALONE))

    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        log_samples(patch, log)
        try:
            launch.rl(recipe, out=out, overrides=overrides, callbacks=Callbacks())
        finally:
            for each in workers:
                each.kill()
                each.wait()
    seconds = time.monotonic() - began
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rollouts = rollouts_of(out)
    trained = check_replay([branch for branches in rollouts for branch in branches], log)
    last = rollouts[-8 * LAST_GROUPS :]
    turns = [sum(turn.trained for b in branches for turn in b.turns) for branches in last]
    return TrainedRun(
        rewards=[line["reward"] for line in lines if "reward" in line],
        seconds=seconds,
        trained_turns=trained,
        tool_turns=sum(turns) / len(turns) - 1,
        cut=sum(len(branches) > 1 for branches in last) / len(last),
    )


def _reward_claim(name: str, run: TrainedRun) -> Claim:
    first, last = sum(run.rewards[:3]) / 3, sum(run.rewards[-3:]) / 3
    return Claim(
        name=f"{name}: trained by an agent in a process of its own, each trained turn sampled",
        target=f"reward from below {BEFORE} to above {AFTER}",
        measured=f"{first:.2f} to {last:.2f} in {len(run.rewards)} updates, {run.seconds:.0f} s; "
        f"{run.trained_turns:,} turns replayed; at the end {run.tool_turns:.1f} tool turns a "
        f"rollout, history cut in {100 * run.cut:.0f} %",
        holds=first < BEFORE and last > AFTER,
    )


def _start(folder: Path) -> Path:
    register()
    return pretrained_on_vault(folder / "start")


PROOFS: dict[str, Callable[[], Claim]] = {
    "histories": histories,
    "kills": kills,
    "fuzzed": fuzzed,
    "hosts": hosts,
    "openai": lambda: learns_vault("openai"),
    "anthropic": lambda: learns_vault("anthropic"),
    "nano-openai": lambda: learns_nano("openai"),
    "nano-anthropic": lambda: learns_nano("anthropic"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=[*PROOFS])
    only = parser.parse_args().only
    print_claims([PROOFS[only]()] if only else claims())


if __name__ == "__main__":
    main()
