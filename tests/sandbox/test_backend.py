"""Sandbox backends: selection, pool, no isolation."""

import asyncio
import contextlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from paddock.sandbox import (
    SandboxError,
    SandboxPool,
    SandboxSettings,
    backend,
    bubblewrap,
    container,
    open_sandbox,
)
from tests.sandbox.sandboxes import BWRAP, SMALL, groups, in_sandbox, machine

only_bwrap = pytest.mark.parametrize("backend", BWRAP)
UNISOLATED = {"backend": "unisolated", "allow_unisolated": True}


@only_bwrap
def test_a_pool_gives_fresh_sandboxes_across_event_loops(backend):
    before = machine()
    pool = SandboxPool(SandboxSettings(backend=backend, limits=SMALL), warm=1)

    async def once():
        async with pool.sandbox() as box:
            return (await box.exec("ls; touch used")).stdout

    async def fill():
        await pool.fill()
        return len(pool._ready)

    assert asyncio.run(fill()) == 1
    assert [asyncio.run(once()) for _ in range(3)] == ["", "", ""]
    asyncio.run(pool.close())
    after = machine()
    assert after["children"] == before["children"]


LEAVES = """
import asyncio
from paddock.sandbox import SandboxPool, SandboxSettings

async def work():
    async with pool.sandbox() as box:
        await box.exec("true")
    await pool.fill()

pool = SandboxPool(SandboxSettings(backend="bwrap"), warm=2)
asyncio.run(work())
"""


@only_bwrap
def test_a_process_that_ends_with_warm_sandboxes_leaves_nothing(backend):
    root = Path(__file__).parents[2]
    maker = subprocess.Popen([sys.executable, "-c", LEAVES], cwd=root, stderr=subprocess.PIPE)
    _, complaints = maker.communicate()
    assert (maker.returncode, complaints) == (0, b"")
    assert groups(maker.pid) == []


@only_bwrap
def test_sixty_rollouts_leave_nothing_behind(backend):
    before = machine()

    async def episodes():
        pool = SandboxPool(SandboxSettings(backend=backend, limits=SMALL), warm=2)
        turn = asyncio.Semaphore(2)

        async def one(i):
            async with turn, pool.sandbox() as box:
                done = await box.exec(f"echo {i} > f; cat f; sleep 100 & exit 3")
                return done.stdout, done.code

        found = await asyncio.gather(*(one(i) for i in range(60)))
        await pool.close()
        return found

    assert asyncio.run(episodes()) == [(f"{i}\n", 3) for i in range(60)]
    assert machine() == before


def test_unisolated_execution_must_be_allowed_explicitly():
    with pytest.raises(SandboxError, match="allow_unisolated"):
        open_sandbox(SandboxSettings(backend="unisolated"))


@pytest.mark.filterwarnings("ignore:code runs without a sandbox")
def test_without_isolation_commands_run_in_a_temporary_folder(tmp_path):
    before = machine()
    with pytest.warns(UserWarning, match="without a sandbox"):
        open_sandbox(SandboxSettings(**UNISOLATED))

    async def work(box):
        await box.put(b"x", "a/b")
        for outside in (str(tmp_path / "out"), "../out"):
            with pytest.raises(SandboxError, match="this machine's own"):
                await box.put(b"x", outside)
        done = await box.exec("pwd; cat a/b; setsid sleep 444 & sleep 60", timeout_s=2.0)
        return box.workspace, done, await box.read("a/b")

    workspace, done, data = in_sandbox(work, **UNISOLATED)
    assert done.timed_out
    assert done.stdout.startswith(workspace)
    assert data == b"x"
    assert not Path(workspace).exists()
    assert machine()["children"] == before["children"]


def test_a_machine_without_a_backend_gets_install_instructions(monkeypatch):
    monkeypatch.setattr(
        bubblewrap,
        "unavailable_reason",
        lambda: f"bubblewrap is not installed: {bubblewrap.INSTALL}",
    )
    monkeypatch.setattr(
        container, "unavailable_reason", lambda: "no container engine: docker is not there"
    )
    with pytest.raises(SandboxError) as refused:
        backend.pick_backend(SandboxSettings())
    for word in ("apt-get install bubblewrap", "docker", "unisolated"):
        assert word in str(refused.value)


def test_missing_bubblewrap_is_named(monkeypatch):
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: None)
    assert "apt-get install bubblewrap" in bubblewrap.unavailable_reason.__wrapped__()


AS_NOBODY = """
import asyncio
from paddock.sandbox import ResourceLimits, SandboxSettings, open_sandbox

FORK = '''
import os, time
count = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(99)
        count += 1
except OSError:
    print(count < 40)
'''

async def main():
    limits = ResourceLimits(
        memory_bytes=128 << 20, disk_bytes=16 << 20, max_processes=40, max_file_bytes=64 << 20
    )
    box = open_sandbox(SandboxSettings(backend="bwrap", limits=limits))
    await box.start()
    for command in ("id -u", "head -c 40M /dev/zero > f", "ls /tmp/nobodys", "touch /usr/x",
                    "touch /x", "touch /dev/x"):
        done = await box.exec(command)
        print(done.code, done.stdout.strip(), "|", done.stderr.strip())
    done = await box.exec([*box.python, "-c", FORK], timeout_s=20)
    print(done.stdout.strip())
    done = await box.exec([*box.python, "-c", "x = bytearray(200 << 20)"])
    print(done.code)
    await box.close()

asyncio.run(main())
"""


@only_bwrap
@pytest.mark.skipif(os.geteuid() != 0, reason="these tests already run unprivileged")
def test_an_unprivileged_user_can_create_sandboxes(backend, tmp_path):
    nobody = {"user": 65534, "group": 65534, "extra_groups": []}
    root = Path(__file__).parents[2]
    env = {
        "HOME": str(tmp_path),
        "PYTHONPATH": f"{root}:{sysconfig.get_paths()['purelib']}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents:
        if parent.owner() == "root" and str(parent).startswith("/tmp/pytest"):
            parent.chmod(0o755)
    version = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    pythons = [path for path in (os.path.realpath(sys.executable), version) if Path(path).exists()]
    for python in pythons:
        ask = [python, "-c", "import pydantic, paddock"]
        with contextlib.suppress(PermissionError):
            if subprocess.run(ask, env=env, capture_output=True, **nobody).returncode == 0:
                break
    else:
        pytest.skip("no interpreter here that another user may run")
    done = subprocess.run(
        [python, "-c", AS_NOBODY], env=env, capture_output=True, text=True, cwd="/", **nobody
    )
    rows = [row.strip() for row in done.stdout.splitlines()]
    assert rows[0] == "0 0 |", done.stderr
    assert "No space left" in rows[1]
    assert rows[2].startswith("2 ")
    assert all(row.startswith("1 ") for row in rows[3:6])
    assert rows[6] == "True"
    assert rows[7] == "1"
