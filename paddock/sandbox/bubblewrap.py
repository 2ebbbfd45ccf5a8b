"""Bubblewrap backend: no daemon, no image, starts in tens of milliseconds.

A sandbox is a chain of three programs: bubblewrap_launcher.py prepares mounts and user ids, bwrap
makes the namespaces and the root, supervisor.py is the first process inside and starts all
commands.

Everything a sandbox writes is in memory (tmpfs), in a mount namespace that ends with it: nothing
is left on disk, whatever happens to this process.
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

# User ids 0, 1, ... inside are these outside: no user has them and they own no files.
FIRST_ID, IDS = 0x7000_0000, 0x1_0000
INSTALL = "apt-get install bubblewrap (or your system's package of that name)"
DPKG = "var/lib/dpkg"
# Directories that stay writable when the root is read-only.
WRITABLE_TOPS = ("home", "opt", "root", "run", "srv", "tmp", "var")


_open: set["BubblewrapSandbox"] = set()


@atexit.register
def _close_all() -> None:
    # Sandboxes die with this process by themselves; their cgroups do not.
    for box in _open:
        if box.owner == os.getpid():
            box.close_now()


class BubblewrapSandbox(SupervisedSandbox):
    """A `Sandbox` made by bubblewrap."""

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
        self._errors = self._info = -1  # pipes: stderr of bwrap, and its --info-fd

    def memory_kills(self) -> int:
        return self._group.memory_kills() if self._group else 0

    async def start(self) -> None:
        if self._process is not None:
            raise SandboxError("the sandbox is already started")
        try:
            async with asyncio.timeout(self.settings.start_timeout_s):
                self._launch()
                channel = self._open_channel()
                channel.receive()
                await channel.ready.wait()
        except TimeoutError:
            await self.close()
            raise SandboxError(
                f"the sandbox did not start within {self.settings.start_timeout_s:g} s"
            ) from None
        except BaseException:
            await self.close()
            raise
        if not channel.alive:
            message = self._last_error()
            await self.close()
            raise SandboxError(f"bubblewrap could not start: {message}")

    def _launch(self) -> None:
        _open.add(self)
        self._group = make_cgroup(self.settings.limits)
        with contextlib.ExitStack() as child_fds:  # closed here once the child has them

            def inherit(fd: int) -> int:
                child_fds.callback(os.close, fd)
                return fd

            cgroup_fds = [inherit(fd) for fd in self._group.procs_fds()] if self._group else []
            ours, theirs = socket.socketpair()
            child_fds.enter_context(theirs)
            self.channel = SupervisorChannel(ours)
            self._info, info = os.pipe()
            self._errors, errors = os.pipe()
            settings = supervisor_settings(
                self.settings, cgroup_fds, grouped=self._group is not None
            )
            argv_inside, supervisor_fd = guest_command("supervisor", settings)
            overlay = self.settings.writable_root and _can_overlay()
            layers = [snapshot.place for snapshot in self.base]
            config = launch_config(self.settings, layers, inherit(info), overlay=overlay)
            config["bwrap"] += ["--", *argv_inside]
            argv, launcher_fd = guest_command("bubblewrap_launcher", config)
            self._process = subprocess.Popen(
                argv,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=inherit(errors),
                pass_fds=[*cgroup_fds, info, inherit(supervisor_fd), inherit(launcher_fd)],
                env=ENV,
            )

    async def snapshot(self, keep: SnapshotFilter = KEEP_ALL) -> FilesystemSnapshot:
        """All processes inside are stopped while the files are copied."""
        channel = self._open_channel()
        await channel.stop_all("stop")
        try:
            assert self._process is not None
            copy = await asyncio.to_thread(copy_changes, self._process.pid)
        finally:
            await channel.send({"op": "resume"})
        if keep != KEEP_ALL:
            await asyncio.to_thread(apply_filter, keep, self._parts(copy))
        return FilesystemSnapshot(backend="bwrap", place=str(copy))

    def _parts(self, copy: Path) -> list[tuple[str, Path, list[Path]]]:
        """Parts of a copy of our changes: mount point, directory, and the layers below it."""
        if not (self.settings.writable_root and _can_overlay()):
            return [("", copy, [])]
        rootfs_dir = rootfs.make_rootfs(
            rootfs.cache_dir(), FIRST_ID if os.geteuid() == 0 else os.geteuid()
        )
        parts = []
        for part in _overlay_view(rootfs_dir).overlays or ():
            name = part_name(part["at"])
            layers = [Path(snapshot.place, name) for snapshot in self.base]
            parts.append((part["at"], copy / name, [*layers, Path(part["source"])]))
        return parts

    async def close(self) -> None:
        channel, process, group = self.channel, self._process, self._group
        if channel is None or channel.closed:
            return
        await channel.close()
        first = self._init_pidfd()
        if process is not None:
            process.kill()
            if first is not None:
                await _wait_for_exit(first)
            process.wait()
        for fd in (self._errors, self._info, first):
            if fd is not None and fd >= 0:
                os.close(fd)
        if group is not None:
            group.remove()
        _open.discard(self)

    def close_now(self) -> None:
        """Kill the sandbox without an event loop, when the interpreter exits."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._group is not None:
            self._group.remove()

    def _init_pidfd(self) -> int | None:
        """A pidfd of the first process inside, or None if it has not started or has exited."""
        if self._info < 0:
            return None
        os.set_blocking(self._info, False)
        try:
            info = os.read(self._info, 4096)
            return os.pidfd_open(json.loads(info)["child-pid"])
        except (BlockingIOError, ValueError, ProcessLookupError):
            return None

    def _last_error(self) -> str:
        """The last line that bubblewrap wrote to stderr."""
        os.set_blocking(self._errors, False)
        with contextlib.suppress(BlockingIOError):
            lines = os.read(self._errors, 1 << 16).decode(errors="replace").splitlines()
            return lines[-1] if lines else "no error output"
        return "no error output"


async def _wait_for_exit(pidfd: int) -> None:
    loop = asyncio.get_running_loop()
    exited = asyncio.Event()
    loop.add_reader(pidfd, exited.set)
    try:
        async with asyncio.timeout(GRACE_S):
            await exited.wait()
    except TimeoutError:
        raise SandboxError("a process of the sandbox survived SIGKILL") from None
    finally:
        loop.remove_reader(pidfd)


def supervisor_settings(
    settings: SandboxSettings, cgroup_fds: list[int], *, grouped: bool
) -> dict[str, Any]:
    """Settings of the supervisor; `cgroup_fds` are the cgroup.procs files that jobs enter."""
    half = settings.limits.max_output_bytes // 2
    return {
        "namespace": True,
        "cgroups": cgroup_fds,
        "rlimits": rlimits(settings.limits, grouped=grouped),
        "head_bytes": half,
        "tail_bytes": half,
        "filter": seccomp.bpf_program(settings.allow_syscalls),
        "namespaces": "namespaces" in settings.allow_syscalls,
        "low_ports": "/proc/sys/net/ipv4/ip_unprivileged_port_start",
    }


@functools.cache
def _can_overlay() -> bool:
    """Whether this machine can give a copy-on-write root; warns once if it cannot."""
    reason = unavailable_reason(writable_root=True)
    if reason is not None:
        warnings.warn(f"sandboxes have a read-only root on this machine: {reason}", stacklevel=2)
    return reason is None


def launch_config(
    settings: SandboxSettings, layers: list[str], info: int, *, overlay: bool
) -> dict[str, Any]:
    """Argument of `bubblewrap_launcher.main`; the caller appends the program to its `bwrap`.

    `layers` are directories of snapshots, newest first; `info` is the descriptor for --info-fd;
    with `overlay` the root is a writable copy-on-write one.
    """
    root = os.geteuid() == 0
    rootfs_dir = rootfs.make_rootfs(rootfs.cache_dir(), FIRST_ID if root else os.geteuid())
    writable = [settings.workdir, *settings.writable_paths]
    view = _overlay_view(rootfs_dir) if overlay else _read_only_view(rootfs_dir, writable)
    binds = [*view.binds, *rootfs.python_command()[1], *settings.read_only_mounts]
    for i, path in enumerate(binds[len(view.binds) :], len(view.binds)):
        view.arguments.extend(["--ro-bind", f"{SCRATCH}/binds/{i}", path])
    if settings.allow_internet:
        for path in ("/etc/resolv.conf", "/etc/hosts"):
            if os.path.exists(path):
                view.arguments.extend(["--ro-bind", f"{SCRATCH}/binds/{len(binds)}", path])
                binds.append(os.path.realpath(path))
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxError(f"bubblewrap is not installed: {INSTALL}")
    unshared = ["pid", "ipc", "uts", *([] if settings.allow_internet else ["net"])]
    return {
        "first_id": FIRST_ID,
        "ids": IDS,
        "disk_bytes": settings.limits.disk_bytes,
        "binds": binds,
        "overlays": view.overlays,
        "layers": layers,
        "dirs": view.dirs + [[name.strip("/"), 0o755] for name in writable],
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
    """How the root file system is assembled."""

    arguments: list[str]  # of bwrap
    binds: list[str]  # host paths to bind-mount
    dirs: list[list[Any]]  # path and mode of directories to create
    overlays: list[dict[str, Any]] | None  # None: the root is read-only


def _read_only_view(rootfs_dir: rootfs.RootFilesystem, writable: list[str]) -> _View:
    arguments = [word for name in rootfs_dir.tops for word in ("--ro-bind", f"/{name}", f"/{name}")]
    for name, target in rootfs_dir.links:
        arguments += ["--symlink", target, f"/{name}"]
    arguments += ["--ro-bind", f"{SCRATCH}/binds/0", "/etc"]
    tops = [*WRITABLE_TOPS, *(path.strip("/") for path in writable)]
    for name in dict.fromkeys(tops):
        arguments += ["--bind", f"{SCRATCH}/changes/{name}", f"/{name}"]
    dirs = [
        [name, mode] for name, mode in rootfs.FOLDERS.items() if name.split("/")[0] in WRITABLE_TOPS
    ]
    arguments += [*_devices("changes"), "--remount-ro", "/"]
    return _View(arguments, [str(rootfs_dir.folder / "etc")], [*dirs, ["shm", 0o1777]], None)


def _overlay_view(rootfs_dir: rootfs.RootFilesystem) -> _View:
    overlays = [{"at": "", "source": str(rootfs_dir.folder), "idmapped": False}]
    overlays += [{"at": name, "source": f"/{name}", "idmapped": True} for name in rootfs_dir.tops]
    if os.path.isdir(f"/{DPKG}"):
        overlays.append({"at": DPKG, "source": f"/{DPKG}", "idmapped": True})
    arguments = ["--bind", f"{SCRATCH}/root", "/", *_devices("root/run")]
    return _View(arguments, [], [["run/shm", 0o1777]], overlays)


def _devices(base: str) -> list[str]:
    shared = ["--bind", f"{SCRATCH}/{base}/shm", "/dev/shm"]
    return ["--proc", "/proc", "--dev", "/dev", *shared, "--remount-ro", "/dev"]


def copy_changes(pid: int) -> Path:
    """Copy all that a sandbox has written; `pid` is the process that launched it.

    Raises SandboxError if the copy fails.
    """
    snapshots = rootfs.cache_dir() / "snapshots"
    snapshots.mkdir(mode=0o700, parents=True, exist_ok=True)
    copy = Path(tempfile.mkdtemp(dir=snapshots))
    source = f"/proc/{pid}/root{SCRATCH}/changes"
    done = subprocess.run(
        ["cp", "-a", f"{source}/.", str(copy)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        shutil.rmtree(copy, ignore_errors=True)
        raise SandboxError(f"the snapshot failed: {done.stderr.strip().splitlines()[-1]}")
    return copy


def delete_snapshot(snapshot: FilesystemSnapshot) -> None:
    shutil.rmtree(snapshot.place, ignore_errors=True)


@functools.cache
def unavailable_reason(*, writable_root: bool = False) -> str | None:
    """Why bubblewrap sandboxes do not work on this machine; None if they do. Starts one to see."""
    if shutil.which("bwrap") is None:
        return f"bubblewrap is not installed: {INSTALL}"
    if (reason := seccomp.unavailable_reason()) is not None:
        return f"no system-call filter: {reason}"
    if writable_root and os.geteuid() != 0:
        return "a copy-on-write root needs root privileges"
    with open(os.devnull, "wb") as info:
        config = launch_config(SandboxSettings(), [], info.fileno(), overlay=writable_root)
        config["bwrap"] += ["--", "true"]
        argv, launcher_fd = guest_command("bubblewrap_launcher", config)
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, pass_fds=[info.fileno(), launcher_fd],
                timeout=30, check=False, env=ENV,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"bubblewrap does not work here: {error}"
        finally:
            os.close(launcher_fd)
    errors = done.stderr.strip().splitlines() or ["no error output"]
    return f"bubblewrap does not work here: {errors[-1]}" if done.returncode else None
