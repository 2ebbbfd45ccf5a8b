"""Small machines of one's own, used once and thrown away, in which anything may be run.

sandbox.py        what a sandbox is, and what it may use up
bubblewrap.py     by bubblewrap
cgroups.py        limits of whole sandboxes
container_snapshot.py  what a container has changed
channel.py        our end of the line to a runner
backend.py        which sandbox this machine can give
container.py      by a container engine
container_engine.py  a container engine's command line
filesystem.py     files into a sandbox and out of it
snapshot_filter.py  which changes a snapshot holds
syscalls.py       system calls that Python does not offer
bubblewrap_launcher.py  a program: what is done before bubblewrap takes over
isolation.py      layers of isolation, and what is lost without one
pool.py           sandboxes started before they are needed
processes.py      a program's part: how processes inside begin and end
python_session.py  a Python interpreter that stays
python_repl.py    a program: that interpreter, inside
supervisor.py     a program: the first process inside
supervised.py     what sandboxes with a runner have in common
seccomp.py        what the kernel refuses to the code inside
shell_session.py  a shell that stays
rootfs.py         which parts of this machine are seen inside
unisolated.py     none at all, for who insists
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
