"""Sandboxes: what a start costs, and whether a thousand episodes leave anything behind.

    python -m benchmarks.sandbox [--episodes 1000] [--at-once 2]

The floor is `subprocess.run` of the same command with no sandbox at all, in the same run. An
episode takes a warm sandbox, writes, reads, leaves a process running in the background, and is
closed. Then processes, mounts and control groups are compared with before. A sandbox has no
folder outside.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.table import Claim, print_claims
from paddock.sandbox import SandboxPool, SandboxSettings, bubblewrap, container, open_sandbox

COMMAND = ["/bin/sh", "-c", "echo hello > f; cat f"]
MARK = f"600.{os.getpid():08}"  # by which our sleepers are told from others'
EPISODE = f"echo $$ > f; cat f > g; (sleep {MARK} &) ; cat g"
STARTS = 40


def milliseconds(times: list[float]) -> str:
    middle, worst = statistics.median(times) * 1000, max(times) * 1000
    return f"{middle:.1f} ms median, {worst:.1f} at worst of {len(times)}"


def floor() -> list[float]:
    times = []
    for _ in range(STARTS):
        began = time.perf_counter()
        subprocess.run(COMMAND, cwd="/tmp", capture_output=True, check=True)
        times.append(time.perf_counter() - began)
    Path("/tmp/f").unlink(missing_ok=True)
    return times


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def cold(settings: SandboxSettings, count: int) -> list[float]:
    """From nothing to the command's answer."""
    times = []
    for _ in range(count):
        box = open_sandbox(settings)

        async def first(box: object = box) -> None:
            await box.start()  # type: ignore[attr-defined]
            await box.exec(COMMAND)  # type: ignore[attr-defined]

        times.append(await timed(first))
        await box.close()
    return times


async def warm(settings: SandboxSettings) -> list[float]:
    """From asking a filled pool to the command's answer."""
    times = []
    pool = SandboxPool(settings, warm=2)
    for _ in range(STARTS):
        await pool.fill()
        began = time.perf_counter()
        box = await pool.take()
        await box.exec(COMMAND)
        times.append(time.perf_counter() - began)
        await box.close()
    await pool.close()
    return times


async def episodes(count: int, at_once: int) -> tuple[float, int]:
    """Seconds for so many episodes, and how many went as they should."""
    pool = SandboxPool(SandboxSettings(backend="bwrap"), warm=at_once)
    turn = asyncio.Semaphore(at_once)
    good = 0

    async def one() -> None:
        nonlocal good
        async with turn, pool.sandbox() as box:
            done = await box.exec(EPISODE)
            good += done.ok and done.stdout.strip().isdigit()

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    seconds = time.perf_counter() - began
    await pool.close()
    return seconds, good


def left_behind() -> dict[str, object]:
    """What can be left behind of ours: processes, mounts, control groups, descriptors."""
    sleeping = 0
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            sleeping += MARK.encode() in file.read_bytes()
        except OSError:
            continue
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    own = f"paddock-{os.getpid()}-"
    groups = [
        f"{folder}/{name}"
        for folder, inner, _ in os.walk("/sys/fs/cgroup")
        for name in inner
        if name.startswith(own)
    ]
    return {
        "processes": sleeping,
        "children": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
        "mounts": [row for row in mounts if "/containers/" not in row],  # an engine's own
        "groups": sorted(groups),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def claims(count: int = 1000, at_once: int = 2) -> list[Claim]:
    found: list[Claim] = []
    floor_s = floor()
    found.append(Claim(name="floor: subprocess.run", measured=milliseconds(floor_s)))
    problem = bubblewrap.unavailable_reason()
    if problem is not None:
        return [*found, Claim(name="bubblewrap", measured=problem)]
    settings = SandboxSettings(backend="bwrap")
    asyncio.run(cold(settings, 2))
    for name, times, most in (
        ("warm: take one, run, answer", asyncio.run(warm(settings)), 0.050),
        ("cold: start one, run, answer", asyncio.run(cold(settings, STARTS)), 0.150),
    ):
        middle = statistics.median(times)
        found.append(
            Claim(
                name=name,
                target=f"< {most * 1000:.0f} ms",
                measured=milliseconds(times),
                holds=middle < most,
            )
        )
    copied = asyncio.run(cold(settings.model_copy(update={"writable_root": True}), STARTS // 2))
    found.append(Claim(name="cold, writable system", measured=milliseconds(copied)))
    found += _container()
    before = left_behind()
    seconds, good = asyncio.run(episodes(count, at_once))
    after = left_behind()
    changed = [name for name in before if before[name] != after[name]]
    left = ", ".join(changed) or "nothing"
    pace = f"{count / seconds:.1f}/s at a load of {os.getloadavg()[0]:.1f}"
    found.append(
        Claim(
            name=f"{count} episodes, {at_once} at once, {os.cpu_count()} cores",
            target="all as they should, nothing left",
            measured=f"{good} good, left: {left}; {pace}",
            holds=good == count and not changed,
        )
    )
    return found


def _container() -> list[Claim]:
    problem = container.unavailable_reason()
    if problem is not None:
        return [Claim(name="container", measured=problem)]
    times = asyncio.run(cold(SandboxSettings(backend="container"), 4))
    return [Claim(name="cold, container", measured=milliseconds(times))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=2)
    said = parser.parse_args()
    print_claims(claims(said.episodes, said.at_once))


if __name__ == "__main__":
    main()
