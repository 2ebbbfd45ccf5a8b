"""Agents in processes of their own: trained through the gateway of a run, killed, scored."""

import json
import sys
from pathlib import Path

import pytest

from paddock import launch
from paddock.journal import Ledger
from paddock.records import Verdict
from tests.rl.vault_runs import RECIPE, events, numbers, recipe_in

ROOT = Path(__file__).parents[2]
AGENT = f"{sys.executable} {ROOT / 'examples/openai_agent.py'}"
SMALL = ["steps=2", "tasks.vault.group_size=2", "credit.keep_zero_variance=true"]


def run_with(folder, start, agent, *sets, text=RECIPE):
    table = "\n".join(f"{key} = {json.dumps(value)}" for key, value in agent.items())
    recipe = recipe_in(folder, start, f"{text}\n[tasks.vault.agent]\n{table}\n")
    return launch.rl(recipe, out=folder / "run", overrides=[*SMALL, *sets])


def rollouts_of(run):
    """Every rollout in a trained group: its branches."""
    with Ledger(run / "ledger.sqlite") as ledger:
        assert ledger.group_counts().is_consistent
        groups = ledger.groups("trained")
        return [branches for g in groups for branches in ledger.rollouts(g.ordinal).values()]


def test_a_process_with_a_stock_client_is_trained(start, tmp_path):
    run = run_with(tmp_path, start, {"command": AGENT})
    found = rollouts_of(run)
    assert sorted(numbers(run)) == [1, 2] and len(found) == 8
    for branches in found:
        assert isinstance(branches[0].outcome, Verdict), branches[0].outcome
        assert any(turn.trained for turn in branches[0].turns)
    assert any(len(branches[0].turns) > 1 for branches in found), "some called a tool"
    assert events(run, "gateway")[0]["url"].startswith("http://127.0.0.1:")
    secret = run / "gateway.json"
    assert secret.stat().st_mode & 0o077 == 0
