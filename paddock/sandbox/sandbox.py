"""What a sandbox is: a small machine of one's own, used once and thrown away.

Whoever holds a `Sandbox` may run anything in it. It sees a read-only system, a workspace and a
private /tmp, no network unless asked for, and it cannot use more than its limits.
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
Command = str | Sequence[str]  # text for a shell, or a program with its arguments


class SandboxError(ValueError):
    """A sandbox that cannot be had, or that broke. Never what the code inside did wrong."""


class ResourceLimits(BaseSettings):
    """What a sandbox may use up. Each process alone may use `cpu_seconds` and write `file_bytes`
    into one file; the others are for the whole sandbox."""

    cpu_seconds: int = Field(default=60, ge=1)
    cpus: float = Field(default=2.0, gt=0)  # cores at a time, where cgroups can be written
    memory_bytes: int = Field(default=GIB, ge=16 * MIB)
    max_processes: int = Field(default=256, ge=4)
    max_file_bytes: int = Field(default=256 * MIB, ge=1)
    disk_bytes: int = Field(default=512 * MIB, ge=MIB)  # all files written, kept in memory
    max_open_files: int = Field(default=1024, ge=16)
    max_output_bytes: int = Field(
        default=64 * KIB, ge=256
    )  # kept of stdout and of stderr; the rest is cut


class SandboxSettings(BaseSettings):
    """How sandboxes are made."""

    backend: BackendName = "auto"  # bwrap where it works, else container
    limits: ResourceLimits = ResourceLimits()
    allow_internet: bool = False
    # Of what the system-call filter denies (see seccomp.py): debuggers need "ptrace", browsers and
    # sandboxes of their own "namespaces". "everything": no filter.
    allow_syscalls: tuple[SyscallGroup, ...] = ()
    timeout_s: float = Field(default=60.0, gt=0)  # of a command that names none
    start_timeout_s: float = Field(default=60.0, gt=0)  # until it must be ready
    writable_root: bool = False  # a copy-on-write root, so that packages can be installed
    writable_paths: tuple[str, ...] = ()  # more folders that can be written, besides the workspace
    read_only_mounts: tuple[
        str, ...
    ] = ()  # folders of this machine that are seen, at their own paths
    workdir: str = "/workspace"
    image: str = ""  # of a container; empty: this machine's own system
    allow_unisolated: bool = False  # must be true for the backend `unisolated`


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What came of a command. `code` is 128 + n if signal n ended it."""

    stdout: str
    stderr: str
    code: int
    seconds: float
    stdout_cut: bool = False  # more was written than is kept: beginning and end are here
    stderr_cut: bool = False
    timed_out: bool = False  # it was killed because its time was over
    out_of_memory: bool = False  # something was killed because memory was over

    @property
    def ok(self) -> bool:
        return self.code == 0 and not self.timed_out


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesystemSnapshot:
    """What a sandbox had written when the snapshot was taken; others can be started from it.
    Of use to sandboxes with the same settings on the same machine, until it is forgotten."""

    backend: str
    place: str  # a folder, a file or an image


class SandboxProcess(Protocol):
    """A program that goes on while one talks to it."""

    cut: bool  # whether the last `drain` left something out

    async def write(self, data: bytes) -> None:
        """To its standard input."""

    async def read(self, stream: Literal["stdout", "stderr"]) -> bytes:
        """What it wrote next; empty once it has ended and all was read."""

    async def drain(self) -> bytes:
        """All of stdout that it wrote up to now and nobody has read."""

    async def kill(self, *, children_only: bool = False) -> None:
        """End it with everything it started, or only what it started."""

    async def wait(self) -> int:
        """Its exit code, once it has ended."""


class Sandbox(Protocol):
    """One sandbox: start, use, close. `close` may be called at any time, and again; it returns when
    no process is left. Methods raise `SandboxError` if the sandbox itself is broken; what a
    command does is in its result."""

    settings: SandboxSettings
    workspace: str  # where commands run, as seen from inside
    python: tuple[str, ...]  # how to run Python there

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
        """Run to the end. A string goes to bash, or to sh where there is no bash. Processes left in
        the background live on until the sandbox is closed."""

    async def spawn(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
    ) -> SandboxProcess:
        """Start, and talk to it. Between two writes at most `output_bytes` of each stream are
        kept."""

    async def put(self, source: Path | bytes, target: str) -> None:
        """A file, a folder or bytes to a path inside. Missing folders are made; what is in a folder
        that exists stays."""

    async def get(self, source: str, target: Path, *, most_bytes: int = 64 * MIB) -> None:
        """A file or folder from inside to a path outside that does not exist yet. Links that lead
        out of it and devices are left behind."""

    async def read(self, path: str, *, most_bytes: int = 16 * MIB) -> bytes:
        """A file's bytes. Raises FileNotFoundError if there is no such file."""

    async def kill(self) -> None:
        """End every process inside; files stay."""

    async def snapshot(self, keep: SnapshotFilter = KEEP_ALL) -> FilesystemSnapshot:
        """What is written now, or part of it, to start others from."""

    async def close(self) -> None:
        """Kill everything and let everything go."""
