"""Sandboxes by bubblewrap: no daemon, no image, started in tens of milliseconds.

launch.py    limits, mounts and identity, outside           bwrap   namespaces and the root
runner.py    the first process inside, which starts all commands

Everything a sandbox writes lies in memory, in a mount namespace that dies with it: nothing is left
on disk, whatever happens to this process.
"""

import asyncio
import atexit
import contextlib
import functools
import json
import os
import shutil
import socket
import subprocess
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddock.envs.sandbox import seccomp, system
from paddock.envs.sandbox.box import SandboxError, SandboxSettings, Snapshot
from paddock.envs.sandbox.cgroups import Group, make_group
from paddock.envs.sandbox.channel import GRACE_S, Channel
from paddock.envs.sandbox.keep import WHOLE, Keep, prune
from paddock.envs.sandbox.launch import SCRATCH, part_name
from paddock.envs.sandbox.running import ENV, Running, command, rlimits

# Inside, ids begin at 0; outside they are these, which nobody has and which own nothing.
FIRST_ID, IDS = 0x7000_0000, 0x1_0000
INSTALL = "apt-get install bubblewrap (or your system's package of that name)"
DPKG = "var/lib/dpkg"
# Folders that can be written where the system cannot, each with what lies in it.
OWN_TOPS = ("home", "opt", "root", "run", "srv", "tmp", "var")


_open: set["Bwrap"] = set()


@atexit.register
def _end_all() -> None:
    """Sandboxes die with this process by themselves; their control groups do not."""
    for box in _open:
        if box.owner == os.getpid():
            box.end()


class Bwrap(Running):
    shell = "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"

    def __init__(self, settings: SandboxSettings, base: tuple[Snapshot, ...] = ()) -> None:
        """`base`: snapshots to start from, the newest first."""
        self.settings, self.workspace = settings, settings.workspace
        self.python = (system.python()[0],)
        self.base = base
        self.owner = os.getpid()
        self._group: Group | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._first: int | None = None  # a pidfd of the first process inside
        self._complaints = self._info = -1  # pipes: what went wrong, and who the first process is

    def memory_kills(self) -> int:
        return self._group.memory_kills() if self._group else 0

    async def start(self) -> None:
        if self._process is not None:
            raise SandboxError("the sandbox was started before")
        try:
            async with asyncio.timeout(self.settings.start_s):
                self._launch()
                line = self._line()
                line.listen()
                await line.ready.wait()
        except TimeoutError:
            await self.close()
            raise SandboxError(f"no sandbox after {self.settings.start_s:g} s") from None
        except BaseException:
            await self.close()
            raise
        if not line.alive:
            said = self._said()
            await self.close()
            raise SandboxError(f"bubblewrap could not start: {said}")

    def _launch(self) -> None:
        _open.add(self)
        self._group = make_group(self.settings.limits)
        with contextlib.ExitStack() as theirs:

            def lent(fd: int) -> int:
                theirs.callback(os.close, fd)
                return fd

            doors = [lent(fd) for fd in self._group.doors()] if self._group else []
            ours, line = socket.socketpair()
            theirs.enter_context(line)
            self.channel = Channel(ours)
            self._info, info = os.pipe()
            self._complaints, said = os.pipe()
            settings = runner_settings(self.settings, doors, grouped=self._group is not None)
            inside, runner = command("runner", settings)
            copied = self.settings.writable_system and _can_copy()
            layers = [snapshot.place for snapshot in self.base]
            plan = plan_for(self.settings, layers, lent(info), copied=copied)
            plan["bwrap"] += ["--", *inside]
            argv, launch = command("launch", plan)
            self._process = subprocess.Popen(
                argv,
                stdin=line.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=lent(said),
                pass_fds=[*doors, info, lent(runner), lent(launch)],
                env=ENV,
            )

    async def snapshot(self, keep: Keep = WHOLE) -> Snapshot:
        """Processes stand still while it is taken."""
        line = self._line()
        await line.halt("stop")
        try:
            assert self._process is not None
            place = await asyncio.to_thread(copy_changes, self._process.pid)
        finally:
            await line.say({"ask": "go"})
        if keep != WHOLE:
            await asyncio.to_thread(prune, keep, self._parts(place))
        return Snapshot(backend="bwrap", place=str(place))

    def _parts(self, place: Path) -> list[tuple[str, Path, list[Path]]]:
        """A copy of our changes, by where they belong, each with what lies below it."""
        if not (self.settings.writable_system and _can_copy()):
            return [("", place, [])]
        skeleton = system.skeleton(system.cache(), FIRST_ID if os.geteuid() == 0 else os.geteuid())
        found = []
        for part in _copied(skeleton).parts or ():
            name = part_name(part["at"])
            layers = [Path(snapshot.place, name) for snapshot in self.base]
            found.append((part["at"], place / name, [*layers, Path(part["from"])]))
        return found

    async def close(self) -> None:
        channel, process, group = self.channel, self._process, self._group
        if channel is None or channel.closed:
            return
        await channel.close()
        first = self._first_process()
        if process is not None:
            process.kill()
            if first is not None:
                await _gone(first)
            process.wait()
        for fd in (self._complaints, self._info, first):
            if fd is not None and fd >= 0:
                os.close(fd)
        if group is not None:
            group.remove()
        _open.discard(self)

    def end(self) -> None:
        """Close without an event loop, in a hurry."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._group is not None:
            self._group.remove()

    def _first_process(self) -> int | None:
        """A descriptor of the first process inside, for as long as there is one."""
        if self._info < 0:
            return None
        os.set_blocking(self._info, False)
        try:
            said = os.read(self._info, 4096)
            return os.pidfd_open(json.loads(said)["child-pid"])
        except (BlockingIOError, ValueError, ProcessLookupError):
            return None

    def _said(self) -> str:
        os.set_blocking(self._complaints, False)
        with contextlib.suppress(BlockingIOError):
            lines = os.read(self._complaints, 1 << 16).decode(errors="replace").splitlines()
            return lines[-1] if lines else "it said nothing"
        return "it said nothing"


async def _gone(pidfd: int) -> None:
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(pidfd, gone.set)
    try:
        async with asyncio.timeout(GRACE_S):
            await gone.wait()
    except TimeoutError:
        raise SandboxError("a process of the sandbox cannot be killed") from None
    finally:
        loop.remove_reader(pidfd)


def runner_settings(
    settings: SandboxSettings, doors: list[int], *, grouped: bool
) -> dict[str, Any]:
    half = settings.limits.output_bytes // 2
    return {
        "namespace": True,
        "cgroups": doors,
        "rlimits": rlimits(settings.limits, grouped=grouped),
        "room": half,
        "tail": half,
        "filter": seccomp.program(settings.allow),
        "namespaces": "namespaces" in settings.allow,
        "low_ports": "/proc/sys/net/ipv4/ip_unprivileged_port_start",
    }


@functools.cache
def _can_copy() -> bool:
    """Whether the system can be a copy-on-write one; if not, it is said once."""
    found = problem(writable_system=True)
    if found is not None:
        warnings.warn(f"sandboxes have a read-only system here: {found}", stacklevel=2)
    return found is None


def plan_for(
    settings: SandboxSettings, layers: list[str], info: int, *, copied: bool
) -> dict[str, Any]:
    """What `launch` is told; its `bwrap` still lacks the program to run. `copied`: the system is a
    copy that can be written."""
    root = os.geteuid() == 0
    skeleton = system.skeleton(system.cache(), FIRST_ID if root else os.geteuid())
    folders = [settings.workspace, *settings.writable]
    view = _copied(skeleton) if copied else _read_only(skeleton, folders)
    shown = [*view.shown, *system.python()[1], *settings.readable]
    for i, path in enumerate(shown[len(view.shown) :], len(view.shown)):
        view.arguments.extend(["--ro-bind", f"{SCRATCH}/shown/{i}", path])
    if settings.network:
        for path in ("/etc/resolv.conf", "/etc/hosts"):
            if os.path.exists(path):
                view.arguments.extend(["--ro-bind", f"{SCRATCH}/shown/{len(shown)}", path])
                shown.append(os.path.realpath(path))
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxError(f"bubblewrap is not installed: {INSTALL}")
    unshared = ["pid", "ipc", "uts", *([] if settings.network else ["net"])]
    return {
        "first_id": FIRST_ID,
        "ids": IDS,
        "disk_bytes": settings.limits.disk_bytes,
        "shown": shown,
        "parts": view.parts,
        "layers": layers,
        "folders": view.folders + [[name.strip("/"), 0o755] for name in folders],
        "bwrap": [
            bwrap,
            *(f"--unshare-{name}" for name in unshared),
            *("--die-with-parent", "--new-session", "--as-pid-1", "--cap-add", "ALL"),
            *("--hostname", "sandbox", "--clearenv", "--info-fd", str(info)),
            *view.arguments,
            *("--chdir", "/"),
        ],
    }


@dataclass(frozen=True, slots=True)
class _View:
    """How a root is put together."""

    arguments: list[str]
    shown: list[str]
    folders: list[list[Any]]
    parts: list[dict[str, Any]] | None


def _read_only(skeleton: system.Skeleton, writable: list[str]) -> _View:
    arguments = [word for name in skeleton.tops for word in ("--ro-bind", f"/{name}", f"/{name}")]
    for name, target in skeleton.links:
        arguments += ["--symlink", target, f"/{name}"]
    arguments += ["--ro-bind", f"{SCRATCH}/shown/0", "/etc"]
    tops = [*OWN_TOPS, *(path.strip("/") for path in writable)]
    for name in dict.fromkeys(tops):
        arguments += ["--bind", f"{SCRATCH}/changes/{name}", f"/{name}"]
    folders = [
        [name, mode] for name, mode in system.FOLDERS.items() if name.split("/")[0] in OWN_TOPS
    ]
    arguments += [*_devices("changes"), "--remount-ro", "/"]
    return _View(arguments, [str(skeleton.folder / "etc")], [*folders, ["shm", 0o1777]], None)


def _copied(skeleton: system.Skeleton) -> _View:
    parts = [{"at": "", "from": str(skeleton.folder), "shifted": False}]
    parts += [{"at": name, "from": f"/{name}", "shifted": True} for name in skeleton.tops]
    if os.path.isdir(f"/{DPKG}"):
        parts.append({"at": DPKG, "from": f"/{DPKG}", "shifted": True})
    arguments = ["--bind", f"{SCRATCH}/root", "/", *_devices("root/run")]
    return _View(arguments, [], [["run/shm", 0o1777]], parts)


def _devices(place: str) -> list[str]:
    shared = ["--bind", f"{SCRATCH}/{place}/shm", "/dev/shm"]
    return ["--proc", "/proc", "--dev", "/dev", *shared, "--remount-ro", "/dev"]


def copy_changes(pid: int) -> Path:
    """A copy of all that a sandbox has written, by the process that launched it."""
    snapshots = system.cache() / "snapshots"
    snapshots.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(dir=snapshots))
    source = f"/proc/{pid}/root{SCRATCH}/changes"
    done = subprocess.run(
        ["cp", "-a", f"{source}/.", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        shutil.rmtree(place, ignore_errors=True)
        raise SandboxError(f"no snapshot could be taken: {done.stderr.strip().splitlines()[-1]}")
    return place


def forget(snapshot: Snapshot) -> None:
    shutil.rmtree(snapshot.place, ignore_errors=True)


@functools.cache
def problem(*, writable_system: bool = False) -> str | None:
    """Why this machine cannot do it; None if it can, which is tried."""
    if shutil.which("bwrap") is None:
        return f"bubblewrap is not installed: {INSTALL}"
    if (lacking := seccomp.problem()) is not None:
        return f"no system-call filter: {lacking}"
    if writable_system and os.geteuid() != 0:
        return "only root can make a copy-on-write system"
    with open(os.devnull, "wb") as info:
        plan = plan_for(SandboxSettings(), [], info.fileno(), copied=writable_system)
        plan["bwrap"] += ["--", "true"]
        argv, launch = command("launch", plan)
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, pass_fds=[info.fileno(), launch],
                timeout=30, check=False, env=ENV,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"bubblewrap does not work here: {error}"
        finally:
            os.close(launch)
    said = done.stderr.strip().splitlines() or ["it said nothing"]
    return f"bubblewrap does not work here: {said[-1]}" if done.returncode else None
