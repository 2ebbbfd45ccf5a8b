"""Control groups, version 1, 2 or both, wherever this process may make them.

Memory, processes and cores of a whole sandbox can be limited by nothing else. Where no group can be
made, limits of single processes remain.
"""

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paddock.sandbox.sandbox import ResourceLimits

MOUNTS, OWN = Path("/proc/self/mounts"), Path("/proc/self/cgroup")
WANTED = ("memory", "pids", "cpu")
_count = itertools.count()


@dataclass(frozen=True, slots=True)
class CgroupParent:
    """A group below which groups can be made."""

    folder: Path
    version: int
    controllers: tuple[str, ...]


@dataclass(slots=True)
class Cgroup:
    """The groups of one sandbox, one in each hierarchy."""

    folders: dict[str, Path]  # by controller; with version 2 they are the same
    _kills: int = 0

    def procs_fds(self) -> list[int]:
        """Descriptors: who writes "0" into each moves into the group, also from a namespace."""
        folders = dict.fromkeys(self.folders.values())
        return [os.open(folder / "cgroup.procs", os.O_WRONLY) for folder in folders]

    def memory_kills(self) -> int:
        """How many processes were killed for memory since the last call."""
        folder = self.folders.get("memory")
        if folder is None:
            return 0
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                rows = dict(row.split() for row in (folder / name).read_text().splitlines())
                before, self._kills = self._kills, int(rows.get("oom_kill", 0))
                return self._kills - before
        return 0

    def remove(self) -> None:
        """Its processes must be dead; the kernel may need a moment to see it."""
        for folder in dict.fromkeys(self.folders.values()):
            for _ in range(100):
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.005)
                else:
                    break


def make_cgroup(limits: ResourceLimits) -> Cgroup | None:
    """A group with these limits; None where there can be none."""
    folders: dict[str, Path] = {}
    name = f"paddock-{os.getpid()}-{next(_count)}"
    for parent in find_cgroup_parents():
        folder = parent.folder / name
        folder.mkdir()
        for controller in parent.controllers:
            _limit(folder, controller, parent.version, limits)
            folders[controller] = folder
    return Cgroup(folders) if folders else None


def _limit(folder: Path, controller: str, version: int, limits: ResourceLimits) -> None:
    # What a sandbox writes is memory too: without the sum a full disk would look like no memory.
    memory = str(limits.memory_bytes + limits.disk_bytes)
    quota = int(limits.cpus * 100_000)
    rows = {
        ("memory", 1): {"memory.limit_in_bytes": memory, "memory.memsw.limit_in_bytes": memory},
        ("memory", 2): {"memory.max": memory, "memory.swap.max": "0"},
        ("pids", 1): {"pids.max": str(limits.max_processes)},
        ("pids", 2): {"pids.max": str(limits.max_processes)},
        ("cpu", 1): {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": str(quota)},
        ("cpu", 2): {"cpu.max": f"{quota} 100000"},
    }[controller, version]
    for name, value in rows.items():
        if "swap" not in name and "memsw" not in name:
            (folder / name).write_text(value)
        elif (folder / name).exists():  # only kernels that account for swap have it
            with contextlib.suppress(OSError):
                (folder / name).write_text(value)


@functools.cache
def find_cgroup_parents() -> tuple[CgroupParent, ...]:
    """Where groups can be made, each tried; what dead processes left there is removed."""
    found: list[CgroupParent] = []
    have: set[str] = set()
    for parent in _candidates(MOUNTS.read_text(), OWN.read_text()):
        wanted = tuple(name for name in parent.controllers if name not in have)
        trial = CgroupParent(parent.folder, parent.version, wanted)
        if wanted and _works(trial):
            found.append(trial)
            have.update(wanted)
            _sweep(trial.folder)
    return tuple(found)


def _candidates(mounts: str, own: str) -> Iterator[CgroupParent]:
    """Groups of which we might make children: our own, then those above it. With version 2 only a
    group without processes has children with limits, so that it is often one above."""
    ours: dict[str, str] = {}
    for row in own.splitlines():
        _, names, path = row.split(":", 2)
        ours |= dict.fromkeys(names.split(","), path)
    for row in mounts.splitlines():
        _, place, kind, options = row.split()[:4]
        if kind == "cgroup":
            held = tuple(name for name in WANTED if name in options.split(","))
            for path in _upwards(ours.get(held[0], "/")) if held else ():
                yield CgroupParent(Path(place + path), 1, held)
        elif kind == "cgroup2":
            for path in _upwards(ours.get("", "/")):
                folder = Path(place + path)
                with contextlib.suppress(OSError):
                    there = (folder / "cgroup.controllers").read_text().split()
                    yield CgroupParent(folder, 2, tuple(name for name in WANTED if name in there))


def _upwards(path: str) -> list[str]:
    """
    >>> _upwards("/user/app")
    ['/user/app', '/user', '/']
    """
    whole = Path(path)
    return [str(step) for step in (whole, *whole.parents)]


def _works(parent: CgroupParent) -> bool:
    folder = parent.folder / f"paddock-{os.getpid()}-{next(_count)}"
    try:
        if parent.version == 2:
            missing = set(parent.controllers) - set(
                (parent.folder / "cgroup.subtree_control").read_text().split()
            )
            for name in missing:
                (parent.folder / "cgroup.subtree_control").write_text(f"+{name}")
        folder.mkdir()
    except OSError:
        return False
    try:
        for controller in parent.controllers:
            _limit(folder, controller, parent.version, ResourceLimits())
        return _can_enter(folder)
    except OSError:
        return False
    finally:
        Cgroup({"": folder}).remove()


def _can_enter(folder: Path) -> bool:
    child = os.fork()
    if child == 0:
        try:
            (folder / "cgroup.procs").write_text("0")
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def _sweep(parent: Path) -> None:
    for folder in parent.glob("paddock-*-*"):
        owner = folder.name.split("-")[1]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            with contextlib.suppress(OSError):
                folder.rmdir()
