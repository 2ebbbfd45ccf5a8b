"""A container engine, docker or podman, by its command line."""

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

from paddock.sandbox import rootfs
from paddock.sandbox.sandbox import SandboxError
from paddock.sandbox.supervisor import FLOOD_BYTES, FLOOD_REST_S

NAMES = ("docker", "podman")
INSTALL = "apt-get install podman runc, or install docker and start its service"
# Where engines are started: their monitors leave a file called `oom` there when a box runs out of
# memory, and here no file can be left.
NOWHERE = "/proc"
PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class ContainerEngine:
    program: str
    flags: tuple[str, ...]  # what `run` needs on this machine

    @property
    def name(self) -> str:
        return Path(self.program).name

    def run(self, *words: str, stdin: bytes | None = None) -> str:
        """Run a command of the engine to its end; what it wrote."""
        done = subprocess.run(
            [self.program, *words], input=stdin, capture_output=True, check=False, cwd=NOWHERE
        )
        if done.returncode:
            raise SandboxError(f"{self.name} {words[0]}: {_last_line(done.stderr)}")
        return done.stdout.decode(errors="replace").strip()


@dataclass(slots=True)
class OutputCollector:
    """One output of a program that is read as it is written: its beginning and its end are kept."""

    room: int
    tail_bytes: int
    head: bytearray = field(default_factory=bytearray)
    tail: bytes = b""
    lost: int = 0
    ended: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, data: bytes) -> None:
        fits = max(0, self.room - len(self.head))
        self.head += data[:fits]
        if data[fits:]:
            whole = self.tail + data[fits:]
            self.tail = whole[-self.tail_bytes :] if self.tail_bytes else b""
            self.lost += len(whole) - len(self.tail)

    async def read_from(self, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(1 << 16):
            self.add(data)
            self.news.set()
            if self.lost > FLOOD_BYTES:
                await asyncio.sleep(FLOOD_REST_S)
        self.ended = True
        self.news.set()

    def text(self) -> bytes:
        gap = f"\n... {self.lost} bytes left out ...\n".encode() if self.lost else b""
        return bytes(self.head) + gap + self.tail

    def take(self) -> bytes:
        data = self.text()
        self.head.clear()
        self.tail, self.lost = b"", 0
        return data


def _last_line(said: bytes) -> str:
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


@functools.cache
def find_container_engine() -> ContainerEngine | str:
    """An engine that starts containers here, or why there is none. Tried with this machine's own
    system, so that no image is needed."""
    problems = []
    for name in NAMES:
        program = shutil.which(name)
        if program is None:
            problems.append(f"{name} is not installed")
            continue
        found = _tried(program)
        if isinstance(found, ContainerEngine):
            return found
        problems.append(f"{name}: {found}")
    return "; ".join(problems)


def _tried(program: str) -> ContainerEngine | str:
    """With as few flags as work. Engines may ask for more open files and processes than they may
    have; podman's own choice of a runtime does not know mixed control groups."""
    limits = ("--ulimit", f"nofile={_hard('NOFILE')}", "--ulimit", f"nproc={_hard('NPROC')}")
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
                cwd=NOWHERE,
            )
        except (SandboxError, OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if done.returncode == 0:
            return engine
        problem = _last_line(done.stderr)
    return problem


def _hard(name: Literal["NOFILE", "NPROC"]) -> str:
    hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1]
    most = {"NOFILE": 1024, "NPROC": 4096}[name]
    value = most if hard == resource.RLIM_INFINITY else min(most, hard)
    return f"{value}:{value}"


def system_mounts() -> list[str]:
    """This machine's programs and libraries, read-only, for containers without an image."""
    skeleton = _skeleton()
    folders = [*(f"/{name}" for name in skeleton.tops), *rootfs.python_command()[1]]
    return [word for path in folders for word in ("-v", f"{path}:{path}:ro")]


def system_image(engine: ContainerEngine) -> str:
    """The image of this machine's system without its programs, made where it is missing."""
    skeleton = _skeleton()
    name = f"paddock-{skeleton.folder.name}:1"
    asked = subprocess.run(
        [engine.program, "image", "inspect", name], capture_output=True, check=False
    )
    if asked.returncode:
        engine.run("import", "-", name, stdin=_archive(skeleton.folder))
    return name


def _skeleton() -> rootfs.RootFilesystem:
    return rootfs.make_rootfs(rootfs.cache_dir(), 0 if os.geteuid() == 0 else os.geteuid())


def _archive(folder: Path) -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        archive.add(folder, ".")
    return whole.getvalue()
