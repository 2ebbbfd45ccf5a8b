"""What sandboxes with a runner inside have in common."""

import asyncio
import functools
import marshal
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from paddock.sandbox import filesystem, rootfs
from paddock.sandbox.channel import GRACE_S, RemoteProcess, SupervisorChannel
from paddock.sandbox.filesystem import CapturedOutput
from paddock.sandbox.sandbox import (
    Command,
    ExecResult,
    ResourceLimits,
    SandboxError,
    SandboxProcess,
    SandboxSettings,
)

HERE = Path(__file__).parent
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENV = {"PATH": PATH, "LANG": "C.UTF-8", "TERM": "dumb", "PYTHONDONTWRITEBYTECODE": "1"}
INTERNAL_COMMAND_TIMEOUT_S = 120.0  # for a program of ours to move files


BOOT = """
import marshal, sys
with open(int(sys.argv[1]), "rb") as file:
    codes, told = marshal.load(file)
for name, code in codes:
    module = sys.modules["paddock.sandbox." + name] = type(sys)(name)
    exec(code, module.__dict__)
module.main(told)
"""


def guest_command(name: str, told: Mapping[str, Any]) -> tuple[list[str], int]:
    """How `main` of a file of this folder is run as a program of its own, and the descriptor that
    it must inherit. The file may need `syscalls` and `processes`. Compiled here: it starts sooner."""
    fd = os.memfd_create(name)
    with open(fd, "wb", closefd=False) as file:
        marshal.dump((_codes(name), dict(told)), file)
    os.lseek(fd, 0, os.SEEK_SET)
    return [rootfs.python_command()[0], "-I", "-S", "-c", BOOT, str(fd)], fd


@functools.cache
def _codes(name: str) -> tuple[tuple[str, CodeType], ...]:
    texts = {each: (HERE / f"{each}.py").read_text() for each in ("syscalls", "processes", name)}
    return tuple((each, compile(text, f"{each}.py", "exec")) for each, text in texts.items())


def rlimits(limits: ResourceLimits, *, grouped: bool) -> dict[str, int]:
    """Limits of single processes. Address space is one only where no group counts memory: it is far
    more than what many programs use."""
    found = {
        "CORE": 0,
        "CPU": limits.cpu_seconds,
        "FSIZE": limits.max_file_bytes,
        "NOFILE": limits.max_open_files,
        "NPROC": limits.max_processes,
    }
    return found if grouped else {**found, "AS": limits.memory_bytes}


def shell_argv(command: Command, shell: str) -> list[str]:
    """
    >>> shell_argv("ls | wc", "/bin/sh"), shell_argv(("ls", "-l"), "/bin/sh")
    (['/bin/sh', '-c', 'ls | wc'], ['ls', '-l'])
    """
    return [shell, "-c", command] if isinstance(command, str) else list(command)


class SupervisedSandbox(filesystem.SandboxFilesystem):
    """A `Sandbox` whose commands go through a channel; how it starts is its child's business."""

    settings: SandboxSettings
    workspace: str
    python: tuple[str, ...]
    shell: str = "/bin/sh"
    channel: SupervisorChannel | None = None

    def _line(self) -> SupervisorChannel:
        if self.channel is None:
            raise SandboxError("the sandbox has not been started")
        return self.channel

    def memory_kills(self) -> int:
        return 0

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
        how: dict[str, Any] = {"cwd": cwd or self.workspace, "env": ENV | dict(env or {})}
        began = time.monotonic()
        job = await self._line().spawn(
            shell_argv(command, self.shell), **how, user=user, stdin=stdin
        )
        timed_out = await _ended(job, timeout_s or self.settings.timeout_s)
        texts = [written.text().decode(errors="replace") for written in job.written]
        assert job.code is not None
        return ExecResult(
            stdout=texts[0],
            stderr=texts[1],
            code=job.code,
            seconds=time.monotonic() - began,
            stdout_cut=bool(job.written[0].lost),
            stderr_cut=bool(job.written[1].lost),
            timed_out=timed_out,
            out_of_memory=self.memory_kills() > 0,
        )

    async def spawn(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
    ) -> SandboxProcess:
        how: dict[str, Any] = {"cwd": cwd or self.workspace, "env": ENV | dict(env or {})}
        return await self._line().spawn(shell_argv(command, self.shell), **how, user=user)

    async def kill(self) -> None:
        await self._line().stop_all("end")

    async def capture(
        self, argv: Sequence[str], *, stdin: bytes = b"", most: int
    ) -> CapturedOutput:
        how: dict[str, Any] = {"cwd": "/", "env": ENV, "user": None}
        job = await self._line().spawn(argv, **how, stdin=stdin, room=most)
        if await _ended(job, INTERNAL_COMMAND_TIMEOUT_S):
            raise SandboxError(
                f"{argv[0]} in the sandbox took over {INTERNAL_COMMAND_TIMEOUT_S:g} s"
            )
        assert job.code is not None
        out, err = job.written
        return CapturedOutput(out.text(), err.text(), job.code, cut=bool(out.lost or out.tail))


async def _ended(job: RemoteProcess, timeout_s: float) -> bool:
    """Wait for a job's end; True if it had to be killed."""
    try:
        async with asyncio.timeout(timeout_s):
            await job.wait()
    except TimeoutError:
        await job.kill()
        try:
            async with asyncio.timeout(GRACE_S):
                await job.wait()
        except TimeoutError:
            raise SandboxError("a command survived being killed") from None
        return True
    return False
