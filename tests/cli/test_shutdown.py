"""Tasks and threads that do not end do not keep a finished run or its process alive."""

import asyncio
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Event

import pytest

from paddock.launch import event_loop

ROOT = Path(__file__).parents[2]
STUBBORN = """
import asyncio, time
from paddock.launch.event_loop import run_with_grace, run_and_exit

async def swallow():
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

async def main():
    asyncio.create_task(swallow(), name="stubborn-1-0")
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 3600)
    await asyncio.sleep(0)

def command():
    run_with_grace(main(), grace_s=0.2)
    print("done")
    {then}

run_and_exit(command)
"""


_tasks = []


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch):
    monkeypatch.setattr(event_loop, "_abandoned", [])


def begin(work, **more):
    _tasks.append(asyncio.create_task(work, **more))


async def swallow(begun, over):
    begun.set()
    while not over.is_set():
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


def test_a_task_that_ignores_cancellation_is_abandoned_by_name(caplog):
    async def main():
        begun = asyncio.Event()
        begin(swallow(begun, Event()), name="vault-3-1")
        await begun.wait()
        return 7

    assert event_loop.run_with_grace(main(), grace_s=0.05) == 7
    assert "vault-3-1" in caplog.text


def test_a_task_gets_a_grace_period_to_clean_up(caplog):
    closed = []

    async def careful():
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.to_thread(closed.append, "a container")

    async def main():
        begin(careful())
        await asyncio.sleep(0)

    event_loop.run_with_grace(main(), grace_s=60)
    assert closed == ["a container"] and not caplog.text


def test_an_error_is_raised_and_other_tasks_are_cancelled():
    async def rude():
        try:
            await asyncio.sleep(3600)
        finally:
            sys.exit(0)

    async def main():
        begin(rude())
        await asyncio.sleep(0)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        event_loop.run_with_grace(main(), grace_s=60)


@pytest.mark.parametrize(
    ("then", "code"), [("", 0), ("raise SystemExit(3)", 3), ("raise KeyError('bug')", 1)]
)
def test_the_process_exits_with_its_code_whatever_is_still_running(then, code):
    done = subprocess.run(
        [sys.executable, "-c", STUBBORN.format(then=then)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, "done\n")
    assert ("bug" in done.stderr) == (code == 1)
