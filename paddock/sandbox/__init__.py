"""Disposable sandboxes for untrusted code: bubblewrap, containers, or no isolation on request.

sandbox.py              interface of a sandbox, its settings and resource limits
backend.py              choice of the backend that works on this machine
bubblewrap.py           backend bwrap
bubblewrap_launcher.py  program: sets up mounts and user ids, then runs bwrap
container.py            backend container
container_engine.py     docker or podman, by its command line
container_snapshot.py   changed files of a container as an archive
unisolated.py           backend unisolated: no sandbox, must be allowed explicitly
supervised.py           sandboxes whose commands go through a supervisor
supervisor.py           program: first process inside, starts all others
channel.py              host side of the connection to a supervisor
processes.py            start and kill processes inside, used by the supervisor
syscalls.py             system calls that Python does not offer
seccomp.py              system-call filter
cgroups.py              limits on memory, processes and cores of a whole sandbox
isolation.py            report of which isolation layers this machine has
rootfs.py               read-only root file system made of this machine's
filesystem.py           copy files into and out of a sandbox
snapshot_filter.py      which changes a snapshot contains
pool.py                 pool of warm sandboxes
shell_session.py        persistent shell
python_session.py       persistent Python interpreter
python_repl.py          program: the interpreter inside
"""

from paddock.sandbox import rootfs
from paddock.sandbox.backend import delete_snapshot, open_sandbox, pick_backend
from paddock.sandbox.container_engine import ContainerEngine, find_container_engine
from paddock.sandbox.filesystem import pack
from paddock.sandbox.isolation import check_isolation
from paddock.sandbox.pool import SandboxPool
from paddock.sandbox.python_session import PythonResult, PythonSession
from paddock.sandbox.sandbox import (
    ExecResult,
    FilesystemSnapshot,
    ResourceLimits,
    Sandbox,
    SandboxError,
    SandboxProcess,
    SandboxSettings,
    SyscallGroup,
)
from paddock.sandbox.shell_session import ShellResult, ShellSession
from paddock.sandbox.snapshot_filter import PROGRAMS, SnapshotFilter
from paddock.sandbox.supervised import PATH

__all__ = [
    "PATH",
    "PROGRAMS",
    "ContainerEngine",
    "ExecResult",
    "FilesystemSnapshot",
    "PythonResult",
    "PythonSession",
    "ResourceLimits",
    "Sandbox",
    "SandboxError",
    "SandboxPool",
    "SandboxProcess",
    "SandboxSettings",
    "ShellResult",
    "ShellSession",
    "SnapshotFilter",
    "SyscallGroup",
    "check_isolation",
    "delete_snapshot",
    "find_container_engine",
    "open_sandbox",
    "pack",
    "pick_backend",
    "rootfs",
]
