"""Agents in other processes: trained through the gateway, killed, and as wild as can be generated.

    python -m benchmarks.agents [--only NAME]

The model is the small one of tests/rl/vault_env.py, pretrained in seconds: an agent must call a
tool before it reports that it is done.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest

from benchmarks.table import Claim, print_claims
from paddock import launch
from tests.rl.hosts import why_no_hosts
from tests.rl.test_agents import killed_at_random_moments
from tests.rl.test_other_hosts import trained_by_hosts
from tests.rl.test_run_fuzzed import fuzzed_run
from tests.rl.vault_env import pretrained_on_vault
from tests.rl.vault_runs import RECIPE, recipe_in, register
from tests.rollout.test_agent_histories import CHANGES, check_agent

AGENTS, KILLS, FUZZED = 3000, 20, 30
BEFORE, AFTER = 0.3, 0.9
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


def learns(client: str) -> Claim:
    """A worker process with the stock client and the agent of examples/ trains the model."""
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        text = f"{RECIPE}\n[tasks.vault.agent]\npull = true\n"
        recipe, run = recipe_in(folder, _start(folder), text), folder / "run"
        command = [sys.executable, "-m", "tests.rl.sdk_worker", client]
        workers: list[subprocess.Popen[bytes]] = []

        class Callbacks(launch.RLCallbacks):
            def on_start(self, step: int, steps: int) -> None:  # noqa: ARG002
                words = [*command, str(run / "gateway.json"), "vault"]
                workers.append(subprocess.Popen(words, stderr=subprocess.DEVNULL))

        began = time.monotonic()
        try:
            launch.rl(recipe, out=run, overrides=TRAIN, callbacks=Callbacks())
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        seconds = time.monotonic() - began
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward/vault"] for line in lines if "reward/vault" in line]
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    return Claim(
        name=f"an agent in its own process with the stock {client} client is trained (vault)",
        target=f"reward from below {BEFORE} to above {AFTER}",
        measured=f"{first:.2f} to {last:.2f} in {len(lines)} updates, {seconds:.0f} s",
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
    "openai": lambda: learns("openai"),
    "anthropic": lambda: learns("anthropic"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=[*PROOFS])
    only = parser.parse_args().only
    print_claims([PROOFS[only]()] if only else claims())


if __name__ == "__main__":
    main()
