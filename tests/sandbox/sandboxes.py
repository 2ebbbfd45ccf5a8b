"""Helpers that run code in sandboxes, and the machine state that must not change."""

import asyncio
import os
import subprocess
import time
from pathlib import Path

import pytest

from paddock.sandbox import ResourceLimits, SandboxSettings, bubblewrap, container, open_sandbox
from tests.patience import PATIENCE_S

MIB = 1 << 20
SMALL = ResourceLimits(
    memory_bytes=96 * MIB,
    max_processes=48,
    max_file_bytes=8 * MIB,
    disk_bytes=24 * MIB,
    max_output_bytes=4096,
)


def missing(backend):
    return bubblewrap.unavailable_reason() if backend == "bwrap" else container.unavailable_reason()


def params(*backends):
    """Backends as test parameters; a missing one is skipped with how to install it."""
    return [
        pytest.param(
            name, marks=pytest.mark.skipif(bool(missing(name)), reason=missing(name) or "")
        )
        for name in backends
    ]


BOTH = params("bwrap", "container")
BWRAP = params("bwrap")
LATER = [BOTH[0], pytest.param("container", marks=[*BOTH[1].marks, pytest.mark.slow])]


def in_sandbox(work, *, backend="bwrap", limits=SMALL, base=(), **settings):
    """Run `work(box)` in a fresh sandbox and return what it returns."""

    async def run():
        box = open_sandbox(SandboxSettings(backend=backend, limits=limits, **settings), *base)
        try:
            await box.start()
            return await work(box)
        finally:
            await box.close()
            if backend == "container":
                words = [box.engine.program, "container", "inspect", box.name]
                assert subprocess.run(words, capture_output=True, check=False).returncode != 0

    return asyncio.run(run())


def execute(command, *, backend="bwrap", timeout_s=20.0, **settings):
    async def work(box):
        return await box.exec(command, timeout_s=timeout_s)

    return in_sandbox(work, backend=backend, **settings)


def machine():
    """State a sandbox must leave unchanged: mounts, our cgroups, children and descriptors. Other
    tests run at the same time: what is not ours is not looked at, nor is an engine's own storage,
    for which `in_sandbox` asks the engine."""
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return {
        "mounts": [row for row in mounts if "/containers/" not in row],
        "groups": groups(os.getpid()),
        "children": children(),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def groups(owner):
    """The control groups of a process. Other processes change theirs meanwhile."""
    found = []
    for folder, inner, _ in os.walk("/sys/fs/cgroup"):
        found += [f"{folder}/{name}" for name in inner if name.startswith(f"paddock-{owner}-")]
    return sorted(found)


def children():
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z":
            found.append(stat.parent.name)
    return sorted(found)


def running(marker):
    """All processes of the machine whose command line contains `marker`."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in file.read_bytes() and int(file.parent.name) != os.getpid():
                found.append(file.parent.name)
        except OSError:
            continue
    return found


def eventually(true):
    """Whether `true()` becomes true before the timeout."""
    deadline = time.monotonic() + PATIENCE_S
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(true())
