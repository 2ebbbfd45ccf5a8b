"""`paddock rl` with its engine in a subprocess."""

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
from tests.rl.vault_runs import DETERMINISTIC, ONE_STEP_OFF, Hashes, numbers, recipe_in


def test_inline_and_subprocess_engines_give_bitwise_identical_weights(start, tmp_path, monkeypatch):
    hashes, found = Hashes(monkeypatch), {}
    recipe = recipe_in(tmp_path, start)
    for position in ("inline", "subprocess"):
        sets = [*DETERMINISTIC, *ONE_STEP_OFF, "steps=3", f"engines.place={position}"]
        run_rl(recipe, tmp_path / position, sets)
        found[position] = hashes.take()
    assert found["subprocess"] == found["inline"]
    assert len(found["subprocess"]) == 3


class Stopping:
    """Sends SIGSTOP to the engine process at its first request."""

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


def test_a_paused_engine_is_not_a_policy_failure(start, tmp_path, monkeypatch):
    stopping, gone = Stopping(monkeypatch), Event()
    remove = ReplicaPool._remove

    def removed(pool, *args):
        remove(pool, *args)
        if stopping.stopped.is_set():
            gone.set()

    def resume_engine():
        gone.wait()
        os.kill(stopping.pid, signal.SIGCONT)

    monkeypatch.setattr(ReplicaPool, "_remove", removed)
    waker = Thread(target=resume_engine, daemon=True)
    waker.start()
    sets = [*ONE_STEP_OFF, "steps=2", "engines.place=subprocess", "credit.keep_zero_variance=true"]
    run_rl(recipe_in(tmp_path, start), tmp_path / "run", sets)
    waker.join()
    with Ledger(tmp_path / "run" / LEDGER_FILE) as ledger:
        assert ledger.failure_counts() == {} and not ledger.group_counts().failed


def test_an_engine_that_never_recovers_ends_the_run_with_the_reason(start, tmp_path, monkeypatch):
    stopping = Stopping(monkeypatch)
    monkeypatch.setattr("paddock.engine.subprocess_engine.EXIT_TIMEOUT_S", 0.5)
    # Long enough for a busy machine to apply the first weights, which the same limit bounds.
    sets = ["engines.place=subprocess", "engines.unreachable_timeout_s=6"]
    why = r"no engine has answered for 6 s: engine-0: \d+ health checks failed"
    with pytest.raises(RunAbortedError, match=why):
        run_rl(recipe_in(tmp_path, start), tmp_path / "run", sets)
    with pytest.raises(ProcessLookupError):
        os.kill(stopping.pid, 0)


def test_a_stopped_engine_does_not_block_a_run_whose_tasks_are_disabled(
    start, tmp_path, monkeypatch
):
    """Rollouts time out long before the engine is declared dead."""
    stopping = Stopping(monkeypatch)
    monkeypatch.setattr("paddock.engine.subprocess_engine.EXIT_TIMEOUT_S", 0.5)
    sets = [
        "engines.place=subprocess",
        "tasks.vault.attempt_timeout_s=1",
        "tasks.vault.max_consecutive_failed=1",
    ]
    with pytest.raises(RunAbortedError, match=r"1 consecutive groups failed.* timeout at attempt"):
        run_rl(recipe_in(tmp_path, start), tmp_path / "run", sets)
    with pytest.raises(ProcessLookupError):
        os.kill(stopping.pid, 0)


def test_a_killed_engine_is_restarted_and_loses_no_rollout(start, tmp_path, monkeypatch):
    """Killed while it generates: a new process loads the current weights, and every rollout ends
    exactly once."""
    started, killed = [], []
    submit, begin = SubprocessEngine.submit, SubprocessEngine._start

    def seen(self, *args, **kwargs):
        name = submit(self, *args, **kwargs)
        if not killed and self.stats().version >= 2:
            killed.append(self.pid)
            os.kill(self.pid, signal.SIGKILL)
        return name

    def counted(self):
        begin(self)
        started.append(self.pid)

    monkeypatch.setattr(SubprocessEngine, "submit", seen)
    monkeypatch.setattr(SubprocessEngine, "_start", counted)
    sets = [*ONE_STEP_OFF, "steps=5", "engines.place=subprocess", "credit.keep_zero_variance=true"]
    run_rl(recipe_in(tmp_path, start), tmp_path / "run", sets)
    assert len(started) == 2 and killed == started[:1]
    assert sorted(numbers(tmp_path / "run")) == [1, 2, 3, 4, 5]
    with Ledger(tmp_path / "run" / LEDGER_FILE) as ledger:
        balance = ledger.group_counts()
    assert balance.in_flight == 0
    assert not balance.failed
