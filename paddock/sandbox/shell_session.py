"""A shell that stays: folder, variables and background jobs are kept from command to command."""

import asyncio
import itertools
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from paddock.sandbox.channel import GRACE_S
from paddock.sandbox.sandbox import Sandbox, SandboxError, SandboxProcess

# Both outputs of commands become one; the shell's own answers go where stderr was.
FIRST = "exec 9>&2 2>&1\n"
# `eval` runs in this shell, so that cd and export last; what it runs reads nothing of ours.
TURN = "eval {command} 9>&- </dev/null\nprintf '%s %s %s\\n' {mark} $? \"$PWD\" >&9\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellResult:
    output: str  # stdout and stderr as they came
    code: int
    cwd: str
    timed_out: bool = False
    ended: bool = False  # the shell is gone, by `exit` or by being killed; the next one is fresh


class ShellSession:
    """Commands, one after another, in one shell of a sandbox. A shell that ends, or that cannot be
    brought back after a time-out, is replaced by a fresh one."""

    def __init__(
        self,
        box: Sandbox,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
    ) -> None:
        self.box, self.cwd, self.env, self.user = box, cwd or box.workspace, env, user
        self._first = self.cwd
        self._shell: SandboxProcess | None = None
        self._mark, self._turns = secrets.token_hex(8), itertools.count()
        self._heard = b""

    async def run(self, command: str, timeout_s: float) -> ShellResult:
        """A command to its end. When its time is over, what it started is killed, and the shell
        stays if it answers."""
        shell = await self._started()
        mark = f"{self._mark}-{next(self._turns)}"
        await shell.write(TURN.format(command=shlex.quote(command), mark=mark).encode())
        timed_out = False
        answer = await self._answer(shell, mark, timeout_s)
        if answer == "":
            timed_out = True
            await shell.kill(children_only=True)
            answer = await self._answer(shell, mark, GRACE_S / 5)
        if not answer:
            return await self._lost(shell, timed_out=timed_out)
        code, _, self.cwd = answer.partition(" ")
        output = (await shell.drain()).decode(errors="replace")
        return ShellResult(output=output, code=int(code), cwd=self.cwd, timed_out=timed_out)

    async def _started(self) -> SandboxProcess:
        if self._shell is None:
            argv = ["bash", "--noprofile", "--norc"]
            if (await self.box.exec("command -v bash", timeout_s=GRACE_S)).code:
                argv = ["sh"]
            shell = await self.box.spawn(argv, cwd=self._first, env=self.env, user=self.user)
            await shell.write(FIRST.encode())
            self._shell, self._heard = shell, b""
        return self._shell

    async def _answer(self, shell: SandboxProcess, mark: str, seconds: float) -> str | None:
        """What the shell said about a turn; "" if it has not, None if it is gone."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    *lines, self._heard = self._heard.split(b"\n")
                    for line in lines:
                        said = line.decode(errors="replace").partition(" ")
                        if said[0] == mark:
                            return said[2]
                    more = await shell.read("stderr")
                    if not more:
                        return None
                    self._heard += more
        except TimeoutError:
            return ""

    async def _lost(self, shell: SandboxProcess, *, timed_out: bool) -> ShellResult:
        await shell.kill()
        try:
            async with asyncio.timeout(GRACE_S):
                code = await shell.wait()
        except TimeoutError:
            raise SandboxError("a shell survived being killed") from None
        output = (await shell.drain()).decode(errors="replace")
        self._shell, self.cwd = None, self._first
        return ShellResult(output=output, code=code, cwd=self.cwd, timed_out=timed_out, ended=True)

    async def close(self) -> None:
        if self._shell is not None:
            await self._shell.kill()
            self._shell = None
