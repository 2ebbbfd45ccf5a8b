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

from paddock.sandbox import rootfs, seccomp
from paddock.sandbox.bubblewrap_launcher import SCRATCH, part_name
from paddock.sandbox.cgroups import Cgroup, make_cgroup
from paddock.sandbox.channel import GRACE_S, SupervisorChannel
from paddock.sandbox.sandbox import FilesystemSnapshot, SandboxError, SandboxSettings
from paddock.sandbox.snapshot_filter import KEEP_ALL, SnapshotFilter, apply_filter
from paddock.sandbox.supervised import ENV, SupervisedSandbox, guest_command, rlimits

# Inside, ids begin at 0; outside they are these, which nobody has and which own nothing.
FIRST_ID, IDS = 0x7000_0000, 0x1_0000
INSTALL = "apt-get install bubblewrap (or your system's package of that name)"
DPKG = "var/lib/dpkg"
# Folders that can be written where the system cannot, each with what lies in it.
OWN_TOPS = ("home", "opt", "root", "run", "srv", "tmp", "var")


_open: set["BubblewrapSandbox"] = set()


@atexit.register
def _end_all() -> None:
    """Sandboxes die with this process by themselves; their control groups do not."""
    for box in _open:
        if box.owner == os.getpid():
            box.close_now()


class BubblewrapSandbox(SupervisedSandbox):
    shell = "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"

    def __init__(
        self, settings: SandboxSettings, base: tuple[FilesystemSnapshot, ...] = ()
    ) -> None:
        """`base`: snapshots to start from, the newest first."""
        self.settings, self.workspace = settings, settings.workdir
        self.python = (rootfs.python_command()[0],)
        self.base = base
        self.owner = os.getpid()
        self._group: Cgroup | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._first: int | None = None  # a pidfd of the first process inside
        self._complaints = self._info = -1  # pipes: what went wrong, and who the first process is

    def memory_kills(self) -> int:
        return self._group.memory_kills() if self._group else 0

    async def start(self) -> None:
        if self._process is not None:
            raise SandboxError("the sandbox was started before")
        try:
            async with asyncio.timeout(self.settings.start_timeout_s):
                self._launch()
                line = self._line()
                line.receive()
                await line.ready.wait()
        except TimeoutError:
            await self.close()
            raise SandboxError(f"no sandbox after {self.settings.start_timeout_s:g} s") from None
        except BaseException:
            await self.close()
            raise
        if not line.alive:
            said = self._said()
            await self.close()
            raise SandboxError(f"bubblewrap could not start: {said}")

    def _launch(self) -> None:
        _open.add(self)
        self._group = make_cgroup(self.settings.limits)
        with contextlib.ExitStack() as theirs:

            def lent(fd: int) -> int:
                theirs.callback(os.close, fd)
                return fd

            doors = [lent(fd) for fd in self._group.procs_fds()] if self._group else []
            ours, line = socket.socketpair()
            theirs.enter_context(line)
            self.channel = SupervisorChannel(ours)
            self._info, info = os.pipe()
            self._complaints, said = os.pipe()
            settings = supervisor_settings(self.settings, doors, grouped=self._group is not None)
            inside, runner = guest_command("supervisor", settings)
            copied = self.settings.writable_root and _can_copy()
            layers = [snapshot.place for snapshot in self.base]
            plan = launch_config(self.settings, layers, lent(info), copied=copied)
            plan["bwrap"] += ["--", *inside]
            argv, launch = guest_command("bubblewrap_launcher", plan)
            self._process = subprocess.Popen(
                argv,
                stdin=line.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=lent(said),
                pass_fds=[*doors, info, lent(runner), lent(launch)],
                env=ENV,
            )

    async def snapshot(self, keep: SnapshotFilter = KEEP_ALL) -> FilesystemSnapshot:
        """Processes stand still while it is taken."""
        line = self._line()
        await line.stop_all("stop")
        try:
            assert self._process is not None
            place = await asyncio.to_thread(copy_changes, self._process.pid)
        finally:
            await line.send({"ask": "go"})
        if keep != KEEP_ALL:
            await asyncio.to_thread(apply_filter, keep, self._parts(place))
        return FilesystemSnapshot(backend="bwrap", place=str(place))

    def _parts(self, place: Path) -> list[tuple[str, Path, list[Path]]]:
        """A copy of our changes, by where they belong, each with what lies below it."""
        if not (self.settings.writable_root and _can_copy()):
            return [("", place, [])]
        skeleton = rootfs.make_rootfs(
            rootfs.cache_dir(), FIRST_ID if os.geteuid() == 0 else os.geteuid()
        )
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

    def close_now(self) -> None:
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


def supervisor_settings(
    settings: SandboxSettings, doors: list[int], *, grouped: bool
) -> dict[str, Any]:
    half = settings.limits.max_output_bytes // 2
    return {
        "namespace": True,
        "cgroups": doors,
        "rlimits": rlimits(settings.limits, grouped=grouped),
        "room": half,
        "tail": half,
        "filter": seccomp.bpf_program(settings.allow_syscalls),
        "namespaces": "namespaces" in settings.allow_syscalls,
        "low_ports": "/proc/sys/net/ipv4/ip_unprivileged_port_start",
    }


@functools.cache
def _can_copy() -> bool:
    """Whether the system can be a copy-on-write one; if not, it is said once."""
    found = unavailable_reason(writable_system=True)
    if found is not None:
        warnings.warn(f"sandboxes have a read-only system here: {found}", stacklevel=2)
    return found is None


def launch_config(
    settings: SandboxSettings, layers: list[str], info: int, *, copied: bool
) -> dict[str, Any]:
    """What `launch` is told; its `bwrap` still lacks the program to run. `copied`: the system is a
    copy that can be written."""
    root = os.geteuid() == 0
    skeleton = rootfs.make_rootfs(rootfs.cache_dir(), FIRST_ID if root else os.geteuid())
    folders = [settings.workdir, *settings.writable_paths]
    view = _copied(skeleton) if copied else _read_only(skeleton, folders)
    shown = [*view.shown, *rootfs.python_command()[1], *settings.read_only_mounts]
    for i, path in enumerate(shown[len(view.shown) :], len(view.shown)):
        view.arguments.extend(["--ro-bind", f"{SCRATCH}/shown/{i}", path])
    if settings.allow_internet:
        for path in ("/etc/resolv.conf", "/etc/hosts"):
            if os.path.exists(path):
                view.arguments.extend(["--ro-bind", f"{SCRATCH}/shown/{len(shown)}", path])
                shown.append(os.path.realpath(path))
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxError(f"bubblewrap is not installed: {INSTALL}")
    unshared = ["pid", "ipc", "uts", *([] if settings.allow_internet else ["net"])]
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


def _read_only(skeleton: rootfs.RootFilesystem, writable: list[str]) -> _View:
    arguments = [word for name in skeleton.tops for word in ("--ro-bind", f"/{name}", f"/{name}")]
    for name, target in skeleton.links:
        arguments += ["--symlink", target, f"/{name}"]
    arguments += ["--ro-bind", f"{SCRATCH}/shown/0", "/etc"]
    tops = [*OWN_TOPS, *(path.strip("/") for path in writable)]
    for name in dict.fromkeys(tops):
        arguments += ["--bind", f"{SCRATCH}/changes/{name}", f"/{name}"]
    folders = [
        [name, mode] for name, mode in rootfs.FOLDERS.items() if name.split("/")[0] in OWN_TOPS
    ]
    arguments += [*_devices("changes"), "--remount-ro", "/"]
    return _View(arguments, [str(skeleton.folder / "etc")], [*folders, ["shm", 0o1777]], None)


def _copied(skeleton: rootfs.RootFilesystem) -> _View:
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
    snapshots = rootfs.cache_dir() / "snapshots"
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


def delete_snapshot(snapshot: FilesystemSnapshot) -> None:
    shutil.rmtree(snapshot.place, ignore_errors=True)


@functools.cache
def unavailable_reason(*, writable_system: bool = False) -> str | None:
    """Why this machine cannot do it; None if it can, which is tried."""
    if shutil.which("bwrap") is None:
        return f"bubblewrap is not installed: {INSTALL}"
    if (lacking := seccomp.unavailable_reason()) is not None:
        return f"no system-call filter: {lacking}"
    if writable_system and os.geteuid() != 0:
        return "only root can make a copy-on-write system"
    with open(os.devnull, "wb") as info:
        plan = launch_config(SandboxSettings(), [], info.fileno(), copied=writable_system)
        plan["bwrap"] += ["--", "true"]
        argv, launch = guest_command("bubblewrap_launcher", plan)
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
