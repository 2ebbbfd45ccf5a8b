"""Base class of sandboxes whose commands go through a supervisor inside."""

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
INTERNAL_COMMAND_TIMEOUT_S = 120.0  # for commands that copy files


BOOT = """
import marshal, sys
with open(int(sys.argv[1]), "rb") as file:
    codes, argument = marshal.load(file)
for name, code in codes:
    module = sys.modules["paddock.sandbox." + name] = type(sys)(name)
    exec(code, module.__dict__)
module.main(argument)
"""


def guest_command(name: str, argument: Mapping[str, Any]) -> tuple[list[str], int]:
    """Command that runs `main(argument)` of module `name` of this package as a separate program.

    Returns its argv and a descriptor that it must inherit. The module may import `syscalls` and
    `processes` only; all are compiled here, because that makes the start faster.
    """
    fd = os.memfd_create(name)
    with open(fd, "wb", closefd=False) as file:
        marshal.dump((_codes(name), dict(argument)), file)
    os.lseek(fd, 0, os.SEEK_SET)
    return [rootfs.python_command()[0], "-I", "-S", "-c", BOOT, str(fd)], fd


@functools.cache
def _codes(name: str) -> tuple[tuple[str, CodeType], ...]:
    texts = {each: (HERE / f"{each}.py").read_text() for each in ("syscalls", "processes", name)}
    return tuple((each, compile(text, f"{each}.py", "exec")) for each, text in texts.items())


def rlimits(limits: ResourceLimits, *, grouped: bool) -> dict[str, int]:
    """Per-process limits. Address space is limited only where no cgroup limits memory, because many
    programs reserve far more than they use."""
    limits_by_name = {
        "CORE": 0,
        "CPU": limits.cpu_seconds,
        "FSIZE": limits.max_file_bytes,
        "NOFILE": limits.max_open_files,
        "NPROC": limits.max_processes,
    }
    return limits_by_name if grouped else {**limits_by_name, "AS": limits.memory_bytes}


def shell_argv(command: Command, shell: str) -> list[str]:
    """The argv of a command; a string is run by the shell.

    >>> shell_argv("ls | wc", "/bin/sh"), shell_argv(("ls", "-l"), "/bin/sh")
    (['/bin/sh', '-c', 'ls | wc'], ['ls', '-l'])
    """
    return [shell, "-c", command] if isinstance(command, str) else list(command)


class SupervisedSandbox(filesystem.SandboxFilesystem):
    """A `Sandbox` whose commands go through a supervisor; subclasses start it."""

    settings: SandboxSettings
    workspace: str
    python: tuple[str, ...]
    shell: str = "/bin/sh"
    channel: SupervisorChannel | None = None

    def _open_channel(self) -> SupervisorChannel:
        if self.channel is None:
            raise SandboxError("the sandbox is not started")
        return self.channel

    def memory_kills(self) -> int:
        """Number of OOM kills since the last call."""
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
        options: dict[str, Any] = {"cwd": cwd or self.workspace, "env": ENV | dict(env or {})}
        started = time.monotonic()
        job = await self._open_channel().spawn(
            shell_argv(command, self.shell), **options, user=user, stdin=stdin
        )
        timed_out = await _wait_or_kill(job, timeout_s or self.settings.timeout_s)
        texts = [output.text().decode(errors="replace") for output in job.outputs]
        assert job.code is not None
        return ExecResult(
            stdout=texts[0],
            stderr=texts[1],
            code=job.code,
            seconds=time.monotonic() - started,
            stdout_cut=bool(job.outputs[0].lost),
            stderr_cut=bool(job.outputs[1].lost),
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
        options: dict[str, Any] = {"cwd": cwd or self.workspace, "env": ENV | dict(env or {})}
        return await self._open_channel().spawn(
            shell_argv(command, self.shell), **options, user=user
        )

    async def kill(self) -> None:
        await self._open_channel().stop_all("kill_all")

    async def capture(
        self, argv: Sequence[str], *, stdin: bytes = b"", max_bytes: int
    ) -> CapturedOutput:
        options: dict[str, Any] = {"cwd": "/", "env": ENV, "user": None}
        job = await self._open_channel().spawn(argv, **options, stdin=stdin, head_bytes=max_bytes)
        if await _wait_or_kill(job, INTERNAL_COMMAND_TIMEOUT_S):
            raise SandboxError(
                f"{argv[0]} in the sandbox exceeded {INTERNAL_COMMAND_TIMEOUT_S:g} s"
            )
        assert job.code is not None
        out, err = job.outputs
        return CapturedOutput(out.text(), err.text(), job.code, cut=bool(out.lost or out.tail))


async def _wait_or_kill(job: RemoteProcess, timeout_s: float) -> bool:
    """Wait for a process; kills it at the timeout and returns True."""
    try:
        async with asyncio.timeout(timeout_s):
            await job.wait()
    except TimeoutError:
        await job.kill()
        try:
            async with asyncio.timeout(GRACE_S):
                await job.wait()
        except TimeoutError:
            raise SandboxError("a command survived SIGKILL") from None
        return True
    return False
