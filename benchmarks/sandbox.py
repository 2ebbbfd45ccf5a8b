"""Sandboxes: start latency, and leftovers after a thousand episodes.

    python -m benchmarks.sandbox [--episodes 1000] [--concurrency 2]

The floor is `subprocess.run` of the same command without a sandbox, in the same run. An episode
takes a warm sandbox, writes, reads, leaves a background process running, and closes the sandbox.
Then processes, mounts and control groups are compared with those before. A sandbox has no folder
on the host.
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
MARK = f"600.{os.getpid():08}"  # identifies the background processes of this benchmark
EPISODE = f"echo $$ > f; cat f > g; (sleep {MARK} &) ; cat g"
STARTS = 40


def milliseconds(times: list[float]) -> str:
    median, worst = statistics.median(times) * 1000, max(times) * 1000
    return f"{median:.1f} ms median, {worst:.1f} max of {len(times)}"


def floor() -> list[float]:
    times = []
    for _ in range(STARTS):
        start = time.perf_counter()
        subprocess.run(COMMAND, cwd="/tmp", capture_output=True, check=True)
        times.append(time.perf_counter() - start)
    Path("/tmp/f").unlink(missing_ok=True)
    return times


async def timed(call: Callable[[], Awaitable[object]]) -> float:
    start = time.perf_counter()
    await call()
    return time.perf_counter() - start


async def cold(settings: SandboxSettings, count: int) -> list[float]:
    """From starting a sandbox to the command's result."""
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
    """From taking a sandbox of a filled pool to the command's result."""
    times = []
    pool = SandboxPool(settings, warm=2)
    for _ in range(STARTS):
        await pool.fill()
        start = time.perf_counter()
        box = await pool.take()
        await box.exec(COMMAND)
        times.append(time.perf_counter() - start)
        await box.close()
    await pool.close()
    return times


async def episodes(count: int, concurrency: int) -> tuple[float, int]:
    """Total seconds, and the number of correct episodes."""
    pool = SandboxPool(SandboxSettings(backend="bwrap"), warm=concurrency)
    limit = asyncio.Semaphore(concurrency)
    good = 0

    async def one() -> None:
        nonlocal good
        async with limit, pool.sandbox() as box:
            done = await box.exec(EPISODE)
            good += done.ok and done.stdout.strip().isdigit()

    start = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    seconds = time.perf_counter() - start
    await pool.close()
    return seconds, good


def left_behind() -> dict[str, object]:
    """State that sandboxes can leak: processes, mounts, control groups, file descriptors."""
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
        "mounts": [row for row in mounts if "/containers/" not in row],  # the engine's own
        "groups": sorted(groups),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def claims(count: int = 1000, concurrency: int = 2) -> list[Claim]:
    found: list[Claim] = []
    floor_s = floor()
    found.append(Claim(name="floor: subprocess.run", measured=milliseconds(floor_s)))
    problem = bubblewrap.unavailable_reason()
    if problem is not None:
        return [*found, Claim(name="bubblewrap", measured=problem)]
    settings = SandboxSettings(backend="bwrap")
    asyncio.run(cold(settings, 2))
    for name, times, max_s in (
        ("warm start and command", asyncio.run(warm(settings)), 0.050),
        ("cold start and command", asyncio.run(cold(settings, STARTS)), 0.150),
    ):
        found.append(
            Claim(
                name=name,
                target=f"< {max_s * 1000:.0f} ms",
                measured=milliseconds(times),
                holds=statistics.median(times) < max_s,
            )
        )
    copied = asyncio.run(cold(settings.model_copy(update={"writable_root": True}), STARTS // 2))
    found.append(Claim(name="cold start, writable root", measured=milliseconds(copied)))
    found += _container()
    before = left_behind()
    seconds, good = asyncio.run(episodes(count, concurrency))
    after = left_behind()
    changed = [name for name in before if before[name] != after[name]]
    left = ", ".join(changed) or "nothing"
    rate = f"{count / seconds:.1f}/s at a load of {os.getloadavg()[0]:.1f}"
    found.append(
        Claim(
            name=f"{count} episodes, {concurrency} concurrent, {os.cpu_count()} cores",
            target="all correct, nothing left",
            measured=f"{good} correct, left: {left}; {rate}",
            holds=good == count and not changed,
        )
    )
    return found


def _container() -> list[Claim]:
    problem = container.unavailable_reason()
    if problem is not None:
        return [Claim(name="container", measured=problem)]
    times = asyncio.run(cold(SandboxSettings(backend="container"), 4))
    return [Claim(name="cold start, container", measured=milliseconds(times))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=2)
    options = parser.parse_args()
    print_claims(claims(options.episodes, options.concurrency))


if __name__ == "__main__":
    main()
