"""`paddock rl` in a subprocess that is killed, interrupted or crashes."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from paddock.checkpoint import load_pretrained
from paddock.checkpoint.weight_sync import weight_digests
from paddock.journal import UNUSED_REASON, Ledger
from paddock.launch.rollouts import LEDGER_FILE
from tests.rl.vault_runs import DETERMINISTIC, ONE_STEP_OFF, numbers, recipe_in

DRIVE = """
import signal, sys, torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if tests run in the background
torch.set_num_threads(1)
from pathlib import Path
from tests.rl.vault_runs import register
from paddock.cli.__main__ import main
register()
words = [word for each in sys.argv[3:] for word in ("--set", each)]
sys.argv = ["paddock", "rl", sys.argv[1], "--out", sys.argv[2], *words]
main()
"""
KILL = """
from paddock.journal import Journal
from tests.killing import kill_after_calls
log_metrics = Journal.log_metrics
def counted(journal, step, **values):
    log_metrics(journal, step, **values)
    if step == {updates}:
        kill_after_calls({calls})
Journal.log_metrics = counted
"""
IGNORE_CANCELLATION = """
import asyncio
from contextlib import suppress
from functools import partial
from importlib import import_module
from paddock.launch.event_loop import run_with_grace
from tests.rl.vault_env import VaultEnv
async def ignore_cancellation(env):
    while int(env.task.id.rsplit("/", 1)[1]) >= 2:  # after the first batch
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
VaultEnv.reset = ignore_cancellation
import_module("paddock.launch.rl").run_with_grace = partial(run_with_grace, grace_s=0.5)
"""
BREAK = """
from paddock.rl.learner import Learner
def train(*_):
    raise ZeroDivisionError("a bug of ours")
Learner.train = train
"""
ROOT = Path(__file__).parents[2]
STEPS = 5


def begun(recipe, out, *sets, first=""):
    command = [sys.executable, "-c", first + DRIVE, str(recipe), str(out), f"steps={STEPS}", *sets]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)


def finished(process):
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr.decode()


def killed_after(recipe, out, *sets, updates, rng):
    """A run that is killed at a random call after `updates` updates."""
    process = begun(
        recipe, out, *sets, first=KILL.format(updates=updates, calls=rng.randint(1, 5000))
    )
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL, stderr.decode()


def weights(out):
    return weight_digests(load_pretrained(out / "checkpoints" / f"step-{STEPS:08d}" / "model"))


@pytest.mark.slow
def test_a_killed_deterministic_run_resumes_bitwise_identically(start, tmp_path):
    recipe, sets, rng = recipe_in(tmp_path, start), [*DETERMINISTIC, *ONE_STEP_OFF], Random(7)
    finished(begun(recipe, tmp_path / "through", *sets))
    for updates in (1, 3):
        killed_after(recipe, tmp_path / "cut", *sets, updates=updates, rng=rng)
    finished(begun(recipe, tmp_path / "cut", *sets))
    assert weights(tmp_path / "cut") == weights(tmp_path / "through")
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "through")


@pytest.mark.slow
def test_a_killed_asynchronous_run_skips_nothing_and_trains_nothing_twice(start, tmp_path):
    recipe, rng, out = recipe_in(tmp_path, start), Random(3), tmp_path / "free"
    sets = [
        "rollout.max_staleness=2",
        "tasks.vault.args.delay_s=0.3",
        "credit.keep_zero_variance=true",
    ]
    killed_after(recipe, out, *sets, updates=2, rng=rng)
    finished(begun(recipe, out, *sets))
    with Ledger(out / LEDGER_FILE) as ledger:
        balance = ledger.group_counts()
        trained = [(e.task, e.number) for e in ledger.groups("trained")]
        by_update = [entry.trained for entry in ledger.groups("trained")]
        unused = sum(entry.reason == UNUSED_REASON for entry in ledger.groups("filtered"))
    assert balance.is_consistent and balance.failed == balance.in_flight == 0
    assert len(set(trained)) == len(trained) == 2 * STEPS
    assert sorted(set(by_update)) == list(range(STEPS))
    # Nothing skipped: every group up to the newest was trained or left unused at the end.
    assert unused == balance.filtered


@pytest.mark.slow
def test_ctrl_c_stops_cleanly_and_the_run_can_be_resumed(start, tmp_path):
    recipe, out = recipe_in(tmp_path, start), tmp_path / "run"
    process = begun(recipe, out, "tasks.vault.args.delay_s=0.3", "steps=40")
    while not (out / "metrics.jsonl").is_file() or not numbers(out):
        assert process.poll() is None, process.communicate()[1].decode()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr.decode()
    assert "Traceback" not in stderr.decode()
    finished(begun(recipe, out, "tasks.vault.args.delay_s=0.3", "steps=40"))
    with Ledger(out / LEDGER_FILE) as ledger:
        assert ledger.group_counts().is_consistent


@pytest.mark.slow
def test_rollouts_that_ignore_cancellation_do_not_keep_the_process_alive(start, tmp_path):
    sets = ["stop_at_reward=0.0", "stop_window=1", *ONE_STEP_OFF, "credit.keep_zero_variance=true"]
    process = begun(recipe_in(tmp_path, start), tmp_path / "run", *sets, first=IGNORE_CANCELLATION)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr.decode()
    assert "was abandoned" in stderr.decode() and "vault-2-0" in stderr.decode()
    assert list(numbers(tmp_path / "run")) == [1]


@pytest.mark.slow
def test_a_bug_ends_the_process_with_a_traceback(start, tmp_path):
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            BREAK + DRIVE,
            str(recipe_in(tmp_path, start)),
            str(tmp_path / "run"),
        ],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "Traceback" in stderr.decode() and "ZeroDivisionError: a bug of ours" in stderr.decode()
