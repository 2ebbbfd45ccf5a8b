"""Interface of a sandbox, its settings and its resource limits.

Anything may be run in a `Sandbox`. Code inside sees a read-only system, a workspace and a private
/tmp, has no network unless allowed, and cannot exceed its limits. Each sandbox is used once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pydantic import Field

from paddock.config import BaseSettings
from paddock.sandbox.snapshot_filter import KEEP_ALL, SnapshotFilter

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
BackendName = Literal["auto", "bwrap", "container", "unisolated"]
SyscallGroup = Literal[
    "ptrace", "namespaces", "io_uring", "keys", "bpf", "perf", "userfaultfd",
    "vsock", "alg", "packet", "netlink", "everything",
]  # fmt: skip
Command = str | Sequence[str]  # a shell command, or a program with arguments


class SandboxError(ValueError):
    """A sandbox could not be started or failed. Never raised for what the code inside did."""


class ResourceLimits(BaseSettings):
    """Resource limits. `cpu_seconds`, `max_file_bytes` and `max_open_files` hold for each process,
    `max_output_bytes` for each stream of a command, the others for the whole sandbox."""

    cpu_seconds: int = Field(default=60, ge=1)
    cpus: float = Field(default=2.0, gt=0)  # cores, where cgroups are available
    memory_bytes: int = Field(default=GIB, ge=16 * MIB)
    max_processes: int = Field(default=256, ge=4)
    max_file_bytes: int = Field(default=256 * MIB, ge=1)
    disk_bytes: int = Field(default=512 * MIB, ge=MIB)  # of all files written, which are in memory
    max_open_files: int = Field(default=1024, ge=16)
    max_output_bytes: int = Field(default=64 * KIB, ge=256)  # of stdout and of stderr each


class SandboxSettings(BaseSettings):
    """Settings of a sandbox."""

    backend: BackendName = "auto"  # bwrap where it works, else container
    limits: ResourceLimits = ResourceLimits()
    allow_internet: bool = False
    # System calls to allow that the filter denies by default (see seccomp.py): debuggers need
    # "ptrace", browsers and nested sandboxes "namespaces". "everything": no filter.
    allow_syscalls: tuple[SyscallGroup, ...] = ()
    timeout_s: float = Field(default=60.0, gt=0)  # of a command without its own timeout
    start_timeout_s: float = Field(default=60.0, gt=0)  # for the sandbox to become ready
    writable_root: bool = False  # a copy-on-write root, so that packages can be installed
    writable_paths: tuple[str, ...] = ()  # writable besides the workspace
    read_only_mounts: tuple[str, ...] = ()  # host directories, visible at the same paths
    workdir: str = "/workspace"
    image: str = ""  # container image; empty: this machine's own system
    allow_unisolated: bool = False  # required for the backend `unisolated`


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """Result of a command. `code` is 128 + n if signal n ended it."""

    stdout: str
    stderr: str
    code: int
    seconds: float
    stdout_cut: bool = False  # the output was too long: head and tail are kept
    stderr_cut: bool = False
    timed_out: bool = False  # killed at its timeout
    out_of_memory: bool = False  # the OOM killer ended a process

    @property
    def ok(self) -> bool:
        return self.code == 0 and not self.timed_out


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesystemSnapshot:
    """Files that a sandbox had written when the snapshot was taken.

    Sandboxes with the same settings on the same machine can be started from it until it is deleted.
    """

    backend: str
    place: str  # path of a directory or file, or name of an image


class SandboxProcess(Protocol):
    """A running program with open streams."""

    cut: bool  # whether the last `drain` dropped output

    async def write(self, data: bytes) -> None:
        """Write to its standard input."""

    async def read(self, stream: Literal["stdout", "stderr"]) -> bytes:
        """The next output; empty once it has exited and everything was read."""

    async def drain(self) -> bytes:
        """All unread stdout that was written so far."""

    async def kill(self, *, children_only: bool = False) -> None:
        """Kill it with its descendants, or only the descendants."""

    async def wait(self) -> int:
        """Wait for the exit and return the exit code."""


class Sandbox(Protocol):
    """One sandbox: start, use, close.

    `close` may be called at any time and more than once; it returns when no process is left.
    Methods raise `SandboxError` if the sandbox itself fails; what a command does is in its result.
    """

    settings: SandboxSettings
    workspace: str  # working directory of commands, as a path inside
    python: tuple[str, ...]  # command of the Python interpreter inside

    async def start(self) -> None: ...

    async def exec(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        user: str | int | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        """Run to the end. A string is run by bash, or by sh if there is no bash.

        Processes left in the background live until the sandbox is closed.
        """

    async def spawn(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
    ) -> SandboxProcess:
        """Start a program and return at once.

        Between two writes at most `max_output_bytes` of each stream are kept.
        """

    async def put(self, source: Path | bytes, target: str) -> None:
        """Copy a file, a directory or bytes to a path inside.

        Missing directories are created; existing contents of a directory stay.
        """

    async def get(self, source: str, target: Path, *, max_bytes: int = 64 * MIB) -> None:
        """Copy a file or directory from inside to a host path that does not exist yet.

        Links that lead out of it and devices are skipped.
        """

    async def read(self, path: str, *, max_bytes: int = 16 * MIB) -> bytes:
        """The contents of a file. Raises FileNotFoundError if there is no such regular file."""

    async def kill(self) -> None:
        """Kill every process inside; files stay."""

    async def snapshot(self, keep: SnapshotFilter = KEEP_ALL) -> FilesystemSnapshot:
        """Save the files written so far, filtered by `keep`, to start other sandboxes from."""

    async def close(self) -> None:
        """Kill all processes and release all resources."""
