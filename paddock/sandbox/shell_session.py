"""Persistent shell in a sandbox: directory, variables and background jobs stay between commands."""

import asyncio
import itertools
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from paddock.sandbox.channel import GRACE_S
from paddock.sandbox.sandbox import Sandbox, SandboxError, SandboxProcess

# stdout and stderr of commands are merged; our status lines go to the former stderr.
SETUP = "exec 9>&2 2>&1\n"
# `eval` runs in this shell, so that cd and export persist; commands cannot read our input.
RUN_COMMAND = "eval {command} 9>&- </dev/null\nprintf '%s %s %s\\n' {mark} $? \"$PWD\" >&9\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellResult:
    output: str  # stdout and stderr, interleaved
    code: int
    cwd: str
    timed_out: bool = False
    ended: bool = False  # the shell exited or was killed; the next command gets a fresh one


class ShellSession:
    """Runs commands one after another in one shell of a sandbox.

    A shell that exits, or that does not respond after a timeout, is replaced by a fresh one.
    """

    def __init__(
        self,
        box: Sandbox,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
    ) -> None:
        self.box, self.cwd, self.env, self.user = box, cwd or box.workspace, env, user
        self._initial_cwd = self.cwd
        self._shell: SandboxProcess | None = None
        self._mark, self._command_ids = secrets.token_hex(8), itertools.count()
        self._buffer = b""

    async def run(self, command: str, timeout_s: float) -> ShellResult:
        """Run a command to its end.

        At the timeout the processes that it started are killed; the shell stays if it responds.
        """
        shell = await self._started()
        mark = f"{self._mark}-{next(self._command_ids)}"
        await shell.write(RUN_COMMAND.format(command=shlex.quote(command), mark=mark).encode())
        timed_out = False
        status = await self._read_status(shell, mark, timeout_s)
        if status == "":
            timed_out = True
            await shell.kill(children_only=True)
            status = await self._read_status(shell, mark, GRACE_S / 5)
        if not status:
            return await self._end(shell, timed_out=timed_out)
        code, _, self.cwd = status.partition(" ")
        output = (await shell.drain()).decode(errors="replace")
        return ShellResult(output=output, code=int(code), cwd=self.cwd, timed_out=timed_out)

    async def _started(self) -> SandboxProcess:
        if self._shell is None:
            argv = ["bash", "--noprofile", "--norc"]
            if (await self.box.exec("command -v bash", timeout_s=GRACE_S)).code:
                argv = ["sh"]
            shell = await self.box.spawn(argv, cwd=self._initial_cwd, env=self.env, user=self.user)
            await shell.write(SETUP.encode())
            self._shell, self._buffer = shell, b""
        return self._shell

    async def _read_status(self, shell: SandboxProcess, mark: str, seconds: float) -> str | None:
        """Exit code and directory after a command; "" at the timeout, None if the shell exited."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    *lines, self._buffer = self._buffer.split(b"\n")
                    for line in lines:
                        found, _, status = line.decode(errors="replace").partition(" ")
                        if found == mark:
                            return status
                    more = await shell.read("stderr")
                    if not more:
                        return None
                    self._buffer += more
        except TimeoutError:
            return ""

    async def _end(self, shell: SandboxProcess, *, timed_out: bool) -> ShellResult:
        await shell.kill()
        try:
            async with asyncio.timeout(GRACE_S):
                code = await shell.wait()
        except TimeoutError:
            raise SandboxError("the shell survived SIGKILL") from None
        output = (await shell.drain()).decode(errors="replace")
        self._shell, self.cwd = None, self._initial_cwd
        return ShellResult(output=output, code=code, cwd=self.cwd, timed_out=timed_out, ended=True)

    async def close(self) -> None:
        if self._shell is not None:
            await self._shell.kill()
            self._shell = None
