"""Control groups (v1, v2 or hybrid) that limit memory, processes and cores of a sandbox.

Only cgroups limit a whole sandbox. Where none can be made, per-process rlimits remain.
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

MOUNTS, OWN_CGROUP = Path("/proc/self/mounts"), Path("/proc/self/cgroup")
CONTROLLERS = ("memory", "pids", "cpu")
_count = itertools.count()


@dataclass(frozen=True, slots=True)
class CgroupParent:
    """A cgroup in which child cgroups can be made."""

    folder: Path
    version: int
    controllers: tuple[str, ...]


@dataclass(slots=True)
class Cgroup:
    """The cgroups of one sandbox, one in each hierarchy."""

    folders: dict[str, Path]  # by controller; with v2 all are the same
    _kills: int = 0

    def procs_fds(self) -> list[int]:
        """Descriptors of cgroup.procs; a process enters by writing "0", also from a namespace."""
        folders = dict.fromkeys(self.folders.values())
        return [os.open(folder / "cgroup.procs", os.O_WRONLY) for folder in folders]

    def memory_kills(self) -> int:
        """Number of processes that the OOM killer ended since the last call."""
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
        """Remove the directories. Retries, because the kernel notices exited processes late."""
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
    """A cgroup with these limits, or None where this process may make none."""
    folders: dict[str, Path] = {}
    name = f"paddock-{os.getpid()}-{next(_count)}"
    for parent in find_cgroup_parents():
        folder = parent.folder / name
        folder.mkdir()
        for controller in parent.controllers:
            _set_limits(folder, controller, parent.version, limits)
            folders[controller] = folder
    return Cgroup(folders) if folders else None


def _set_limits(folder: Path, controller: str, version: int, limits: ResourceLimits) -> None:
    # Files are in tmpfs and count as memory: without the sum a full disk would look like OOM.
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
        elif (folder / name).exists():  # absent in kernels without swap accounting
            with contextlib.suppress(OSError):
                (folder / name).write_text(value)


@functools.cache
def find_cgroup_parents() -> tuple[CgroupParent, ...]:
    """Cgroups in which children can be made, each tested. Removes leftovers of dead processes."""
    found: list[CgroupParent] = []
    covered: set[str] = set()
    for parent in _candidates(MOUNTS.read_text(), OWN_CGROUP.read_text()):
        controllers = tuple(name for name in parent.controllers if name not in covered)
        candidate = CgroupParent(parent.folder, parent.version, controllers)
        if controllers and _works(candidate):
            found.append(candidate)
            covered.update(controllers)
            _remove_stale(candidate.folder)
    return tuple(found)


def _candidates(mounts: str, own: str) -> Iterator[CgroupParent]:
    """Possible parents: our own cgroup, then its ancestors.

    With v2 only a cgroup without processes may have children with limits, so it is often an
    ancestor.
    """
    ours: dict[str, str] = {}
    for row in own.splitlines():
        _, names, path = row.split(":", 2)
        ours |= dict.fromkeys(names.split(","), path)
    for row in mounts.splitlines():
        _, mount_point, kind, options = row.split()[:4]
        if kind == "cgroup":
            mounted = tuple(name for name in CONTROLLERS if name in options.split(","))
            for path in _ancestors(ours.get(mounted[0], "/")) if mounted else ():
                yield CgroupParent(Path(mount_point + path), 1, mounted)
        elif kind == "cgroup2":
            for path in _ancestors(ours.get("", "/")):
                folder = Path(mount_point + path)
                with contextlib.suppress(OSError):
                    available = (folder / "cgroup.controllers").read_text().split()
                    yield CgroupParent(
                        folder, 2, tuple(name for name in CONTROLLERS if name in available)
                    )


def _ancestors(path: str) -> list[str]:
    """
    >>> _ancestors("/user/app")
    ['/user/app', '/user', '/']
    """
    return [str(each) for each in (Path(path), *Path(path).parents)]


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
            _set_limits(folder, controller, parent.version, ResourceLimits())
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


def _remove_stale(parent: Path) -> None:
    for folder in parent.glob("paddock-*-*"):
        owner = folder.name.split("-")[1]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            with contextlib.suppress(OSError):
                folder.rmdir()
