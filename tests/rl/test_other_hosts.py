"""Environment workers on other machines: links that are cut and restored, a machine that dies."""

import sys
import threading

import pytest

from paddock import launch
from paddock.journal import Ledger
from tests.rl.hosts import ADDRESS, hosts, why_no_hosts
from tests.rl.test_agents import ROOT, rollouts_of, run_with
from tests.rollout.replay import check_replay, log_samples

WORKER = [sys.executable, str(ROOT / "tests/rl/agent_script.py"), "pull"]
CUT_S, IDLE_S = 3.0, 1.0  # a worker behind a cut link is lost before the link is back


class Faults(launch.RLCallbacks):
    """Workers on the hosts; after updates the link of the first is cut for a while, each time, and
    then the second dies."""

    def __init__(self, run, machines, cuts):
        self.run, self.machines, self.cuts, self.died = run, machines, cuts, False
        self.restoring = []

    def on_start(self, step, steps):
        for host in self.machines:
            for _ in range(2):
                host.start(*WORKER, str(self.run / "gateway.json"), "vault")

    def on_update(self, metrics):
        first, second = self.machines
        if self.cuts:
            self.cuts -= 1
            first.cut()
            self.restoring.append(threading.Timer(CUT_S, first.restore))
            self.restoring[-1].start()
        elif not self.died:
            for timer in self.restoring:
                timer.join()
            second.crash()
            self.died = True


def trained_by_hosts(start, folder, patch, *, cuts, steps):
    """A run whose workers are on two other machines; checks it, returns rollouts and retries."""
    sampled, run = [], folder / "run"
    log_samples(patch, sampled)
    agent = {"pull": True, "idle_timeout_s": IDLE_S, "max_retries": 50}
    with hosts(2) as machines:
        faults = Faults(run, machines, cuts)
        run_with(
            *(folder, start, agent, f"steps={steps}", f"gateway.host={ADDRESS}"), callbacks=faults
        )
    assert faults.died and not faults.cuts
    with Ledger(run / "ledger.sqlite") as ledger:
        assert list(ledger.failure_counts()) == [], "every loss was made good"
        assert ledger.group_counts().failed == 0
    found = rollouts_of(run)
    assert len(found) == 4 * steps, "no group was lost"
    sessions = [branches[0].session_id for branches in found]
    assert len(set(sessions)) == len(sessions), "none came twice"
    for branches in found:
        check_replay(branches, sampled)
    turns = sum(len(branch.turns) for branches in found for branch in branches)
    return len(found), len(sampled) - turns


def test_links_may_be_cut_and_a_host_may_die(start, tmp_path, monkeypatch):
    if why := why_no_hosts():
        pytest.skip(f"NO OTHER HOSTS HERE: {why}")
    trained_by_hosts(start, tmp_path, monkeypatch, cuts=1, steps=4)
