"""`paddock rl` with its engine in a process of its own."""

import os
import signal
from threading import Event, Thread

import pytest

from paddock.cli.rl import run_rl
from paddock.engine import SubprocessEngine
from paddock.journal import Ledger
from paddock.launch.rollouts import LEDGER_FILE
from paddock.rollout.replica_pool import ReplicaPool
from paddock.rollout.task_health import RunAbortedError
from tests.rl.vault_runs import LOCKSTEP, ONE_STEP_OFF, Hashes, numbers, recipe_in


def test_apart_or_not_the_weights_are_the_same_bit_for_bit(start, tmp_path, monkeypatch):
    hashes, found = Hashes(monkeypatch), {}
    recipe = recipe_in(tmp_path, start)
    for place in ("inline", "subprocess"):
        sets = [*LOCKSTEP, *ONE_STEP_OFF, "steps=3", f"engines.place={place}"]
        run_rl(recipe, tmp_path / place, sets)
        found[place] = hashes.take()
    assert found["subprocess"] == found["inline"]
    assert len(found["subprocess"]) == 3


class Stopping:
    """Stops the engine's process as soon as it was asked for the first token."""

    def __init__(self, monkeypatch):
        self.pid, self.stopped = None, Event()
        submit = SubprocessEngine.submit

        def seen(engine, *args, **kwargs):
            name = submit(engine, *args, **kwargs)
            if not self.stopped.is_set():
                self.pid = engine.pid
                os.kill(self.pid, signal.SIGSTOP)
                self.stopped.set()
            return name

        monkeypatch.setattr(SubprocessEngine, "submit", seen)


def test_an_engine_that_was_paused_is_no_fault_of_the_policy(start, tmp_path, monkeypatch):
    stopping, gone = Stopping(monkeypatch), Event()
    bury = ReplicaPool._remove

    def buried(fleet, *args):
        bury(fleet, *args)
        if stopping.stopped.is_set():
            gone.set()

    def go_on():
        gone.wait()
        os.kill(stopping.pid, signal.SIGCONT)

    monkeypatch.setattr(ReplicaPool, "_remove", buried)
    waker = Thread(target=go_on, daemon=True)
    waker.start()
    sets = [*ONE_STEP_OFF, "steps=2", "engines.place=subprocess", "credit.keep_zero_variance=true"]
    run_rl(recipe_in(tmp_path, start), tmp_path / "run", sets)
    waker.join()
    with Ledger(tmp_path / "run" / LEDGER_FILE) as ledger:
        assert ledger.failure_counts() == {} and not ledger.group_counts().failed


def test_an_engine_that_never_comes_back_ends_the_run_with_the_reason(start, tmp_path, monkeypatch):
    stopping = Stopping(monkeypatch)
    monkeypatch.setattr("paddock.engine.subprocess_engine.EXIT_TIMEOUT_S", 0.5)
    sets = ["engines.place=subprocess", "engines.unreachable_timeout_s=1"]
    why = r"no engine has answered for 1 s: engine-0: \d+ health checks failed"
    with pytest.raises(RunAbortedError, match=why):
        run_rl(recipe_in(tmp_path, start), tmp_path / "run", sets)
    with pytest.raises(ProcessLookupError):
        os.kill(stopping.pid, 0)


def test_a_stopped_engine_does_not_keep_a_run_whose_tasks_are_set_aside(
    start, tmp_path, monkeypatch
):
    """Attempts run out of time long before the engine is given up."""
    stopping = Stopping(monkeypatch)
    monkeypatch.setattr("paddock.engine.subprocess_engine.EXIT_TIMEOUT_S", 0.5)
    sets = [
        "engines.place=subprocess",
        "tasks.vault.attempt_timeout_s=1",
        "tasks.vault.max_consecutive_failed=1",
    ]
    with pytest.raises(RunAbortedError, match=r"1 consecutive groups failed.* time at attempt"):
        run_rl(recipe_in(tmp_path, start), tmp_path / "run", sets)
    with pytest.raises(ProcessLookupError):
        os.kill(stopping.pid, 0)


def test_an_engine_killed_on_the_way_costs_no_attempt(start, tmp_path, monkeypatch):
    """Killed while it answers; another takes its place, with the weights of that moment, and every
    attempt ends exactly once."""
    born, killed = [], []
    submit, begin = SubprocessEngine.submit, SubprocessEngine._start

    def seen(self, *args, **kwargs):
        name = submit(self, *args, **kwargs)
        if not killed and self.stats().version >= 2:
            killed.append(self.pid)
            os.kill(self.pid, signal.SIGKILL)
        return name

    def counted(self):
        begin(self)
        born.append(self.pid)

    monkeypatch.setattr(SubprocessEngine, "submit", seen)
    monkeypatch.setattr(SubprocessEngine, "_start", counted)
    sets = [*ONE_STEP_OFF, "steps=5", "engines.place=subprocess", "credit.keep_zero_variance=true"]
    run_rl(recipe_in(tmp_path, start), tmp_path / "run", sets)
    assert len(born) == 2 and killed == born[:1]
    assert sorted(numbers(tmp_path / "run")) == [1, 2, 3, 4, 5]
    with Ledger(tmp_path / "run" / LEDGER_FILE) as ledger:
        balance = ledger.group_counts()
    assert balance.in_flight == 0
    assert not balance.failed
