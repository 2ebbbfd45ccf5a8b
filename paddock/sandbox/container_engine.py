"""Container engine (docker or podman), driven by its command line."""

import asyncio
import functools
import io
import os
import resource
import shutil
import subprocess
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from paddock.sandbox import rootfs, seccomp
from paddock.sandbox.sandbox import SandboxError, SandboxSettings
from paddock.sandbox.supervised import rlimits
from paddock.sandbox.supervisor import FLOOD_BYTES, FLOOD_PAUSE_S

NAMES = ("docker", "podman")
INSTALL = "apt-get install podman runc, or install docker and start its service"
# Working directory of engines: their monitors leave a file `oom` there when a container runs out of
# memory, and no file can be created in /proc.
ENGINE_CWD = "/proc"
PROBE_TIMEOUT_S = 60.0
WRITABLE_FOLDERS = ("/tmp", "/run", "/root", "/home", "/var/tmp", "/var/log", "/opt", "/srv")
DROPPED_CAPABILITIES = ("AUDIT_WRITE", "MKNOD", "NET_RAW")  # engines grant them by default
# Init: reaps orphans while it waits, restarts its child if that is killed, and exits with the pipe.
# At USR1 it kills all other processes: at the process limit nobody else could start a `kill`.
INIT_SCRIPT = """trap "" TERM INT HUP QUIT; trap "kill -KILL -1" USR1; exec 3<&0; echo ready
while :; do cat <&3 >/dev/null & wait $!; test $? -lt 128 && break; done"""
# Kills a process with its descendants, or only the descendants, stopping each first.
KILL_TREE = """
below() { for child in $(cat /proc/"$1"/task/*/children 2>/dev/null); do
kill -STOP "$child" 2>/dev/null; below "$child"; kill -KILL "$child" 2>/dev/null; done; }
test "$2" = only || kill -STOP "$1"; below "$1"; test "$2" = only || kill -KILL "$1"
"""
# Waits, without starting a program, until only init, its child and this shell are left.
ALL_DEAD = """i=0
while test $i -lt 20000; do set -- /proc/[0-9]*; test $# -lt 5 && exit; i=$((i + 1)); done"""
# OOM kill counters in cgroup v2 and v1.
MEMORY_KILLS = "cat /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control"
# The OOM killer must take commands before init, which keeps the container alive.
DIE_FIRST = 'echo 1000 >/proc/self/oom_score_adj; exec "$@"'


@dataclass(frozen=True, slots=True)
class ContainerEngine:
    program: str
    flags: tuple[str, ...]  # that `run` needs on this machine

    @property
    def name(self) -> str:
        return Path(self.program).name

    def run(self, *args: str, stdin: bytes | None = None) -> str:
        """Run a command of the engine and return its stdout. Raises SandboxError if it fails."""
        done = subprocess.run(
            [self.program, *args], input=stdin, capture_output=True, check=False, cwd=ENGINE_CWD
        )
        if done.returncode:
            raise SandboxError(f"{self.name} {args[0]}: {_last_line(done.stderr)}")
        return done.stdout.decode(errors="replace").strip()


@dataclass(slots=True)
class OutputCollector:
    """One output of a running program; its head and tail are kept, the rest is counted."""

    head_bytes: int
    tail_bytes: int
    head: bytearray = field(default_factory=bytearray)
    tail: bytes = b""
    lost: int = 0
    ended: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, data: bytes) -> None:
        fits = max(0, self.head_bytes - len(self.head))
        self.head += data[:fits]
        if data[fits:]:
            rest = self.tail + data[fits:]
            self.tail = rest[-self.tail_bytes :] if self.tail_bytes else b""
            self.lost += len(rest) - len(self.tail)

    async def read_from(self, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(1 << 16):
            self.add(data)
            self.changed.set()
            if self.lost > FLOOD_BYTES:
                await asyncio.sleep(FLOOD_PAUSE_S)
        self.ended = True
        self.changed.set()

    def text(self) -> bytes:
        gap = f"\n... {self.lost} bytes left out ...\n".encode() if self.lost else b""
        return bytes(self.head) + gap + self.tail

    def take(self) -> bytes:
        """What was collected since the last call."""
        data = self.text()
        self.head.clear()
        self.tail, self.lost = b"", 0
        return data


def _last_line(stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no error output"


@functools.cache
def find_container_engine() -> ContainerEngine | str:
    """An engine that can start containers on this machine, or the reason why there is none.

    Tested with an image made of this machine's own root, so that nothing is downloaded.
    """
    problems = []
    for name in NAMES:
        program = shutil.which(name)
        if program is None:
            problems.append(f"{name} is not installed")
            continue
        found = _probe(program)
        if isinstance(found, ContainerEngine):
            return found
        problems.append(f"{name}: {found}")
    return "; ".join(problems)


def _probe(program: str) -> ContainerEngine | str:
    """The engine with as few flags as work, or its error.

    Engines may request more open files and processes than the hard limits allow, and podman's
    default runtime does not support hybrid cgroups.
    """
    limits = ("--ulimit", f"nofile={_ulimit('NOFILE')}", "--ulimit", f"nproc={_ulimit('NPROC')}")
    runc = ("--runtime", "runc") if shutil.which("runc") else ()
    problem = ""
    for flags in dict.fromkeys([(), limits, (*runc, *limits)]):
        engine = ContainerEngine(program, flags)
        try:
            image = system_image(engine)
            command = [program, "run", "--rm", *flags, "--network", "none", *system_mounts(), image]
            done = subprocess.run(
                [*command, "true"],
                capture_output=True,
                check=False,
                timeout=PROBE_TIMEOUT_S,
                cwd=ENGINE_CWD,
            )
        except (SandboxError, OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if done.returncode == 0:
            return engine
        problem = _last_line(done.stderr)
    return problem


def _ulimit(name: Literal["NOFILE", "NPROC"]) -> str:
    hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1]
    default = {"NOFILE": 1024, "NPROC": 4096}[name]
    value = default if hard == resource.RLIM_INFINITY else min(default, hard)
    return f"{value}:{value}"


def run_options(engine: ContainerEngine, settings: SandboxSettings) -> list[str]:
    """Options of `run` that apply the limits, the network setting and the mounts of a sandbox."""
    limits = settings.limits
    memory = limits.memory_bytes + (0 if settings.writable_root else limits.disk_bytes)
    rows = rlimits(limits, grouped=True).items()
    ulimits = [f"--ulimit={name.lower()}={value}:{value}" for name, value in rows]
    profile = seccomp.profile_file(settings.allow_syscalls, rootfs.cache_dir())
    options = [
        *engine.flags,
        *ulimits,
        *("--memory", str(memory), "--memory-swap", str(memory), "--cpus", str(limits.cpus)),
        *("--pids-limit", str(limits.max_processes), "--security-opt", "no-new-privileges"),
        *("--security-opt", f"seccomp={profile}"),
        *(f"--cap-drop={name}" for name in DROPPED_CAPABILITIES),
        *("--hostname", "sandbox", "--shm-size", str(limits.disk_bytes)),
        *(() if settings.allow_internet else ("--network", "none")),
        *(() if settings.image else system_mounts()),
        *(word for path in settings.read_only_mounts for word in ("-v", f"{path}:{path}:ro")),
    ]
    if not settings.writable_root:
        disk = f"rw,exec,nosuid,nodev,size={limits.disk_bytes}"
        paths = dict.fromkeys((*WRITABLE_FOLDERS, settings.workdir, *settings.writable_paths))
        options += ["--read-only"]
        options += ["--read-only-tmpfs=false"] if engine.name == "podman" else []
        options += [word for path in paths for word in ("--tmpfs", f"{path}:{disk}")]
    return options


def system_mounts() -> list[str]:
    """Mount options with this machine's programs and libraries, for containers without an image."""
    root = _rootfs()
    folders = [*(f"/{name}" for name in root.tops), *rootfs.python_command()[1]]
    return [word for path in folders for word in ("-v", f"{path}:{path}:ro")]


def system_image(engine: ContainerEngine) -> str:
    """Name of an image of this machine's root without programs; imported if it is missing."""
    root = _rootfs()
    name = f"paddock-{root.folder.name}:1"
    inspected = subprocess.run(
        [engine.program, "image", "inspect", name], capture_output=True, check=False
    )
    if inspected.returncode:
        engine.run("import", "-", name, stdin=_archive(root.folder))
    return name


def _rootfs() -> rootfs.RootFilesystem:
    return rootfs.make_rootfs(rootfs.cache_dir(), 0 if os.geteuid() == 0 else os.geteuid())


def _archive(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(folder, ".")
    return buffer.getvalue()
