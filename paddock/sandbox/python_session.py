"""Persistent Python interpreter in a sandbox: names defined by one cell stay for the next."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paddock.sandbox.channel import GRACE_S
from paddock.sandbox.python_repl import LENGTH
from paddock.sandbox.sandbox import Sandbox, SandboxError, SandboxProcess

REPL_PROGRAM = Path(__file__).with_name("python_repl.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonResult:
    output: str  # what was printed, and the value of a final expression as at the prompt
    error: str = ""  # traceback
    timed_out: bool = False
    cut: bool = False  # the output was too long: head and tail are kept
    restarted: bool = False  # the interpreter was replaced and its names are gone


class PythonSession:
    """Runs cells one after another in one interpreter of a sandbox.

    An interpreter that exits or exceeds its timeout is replaced, and the result says so.
    """

    def __init__(
        self,
        box: Sandbox,
        *,
        python: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.box, self.env = box, env
        self.python = tuple(python or box.python)
        self._interpreter: SandboxProcess | None = None
        self._buffer = b""

    async def run(self, code: str, timeout_s: float) -> PythonResult:
        """Run one cell. Raises SandboxError only if the sandbox itself fails."""
        interpreter = await self._started()
        source = code.encode(errors="replace")
        await interpreter.write(LENGTH.pack(len(source)) + source)
        try:
            async with asyncio.timeout(timeout_s):
                error = await self._read_reply(interpreter)
        except TimeoutError:
            output = await self._end(interpreter)
            message = f"TimeoutError: over {timeout_s:g} s; the interpreter was restarted"
            return PythonResult(
                output=output.decode(errors="replace"),
                error=message,
                timed_out=True,
                restarted=True,
            )
        if error is None:
            output = await self._end(interpreter)
            message = (
                f"the interpreter ended (exit code {await interpreter.wait()}) and was restarted"
            )
            return PythonResult(
                output=output.decode(errors="replace"), error=message, restarted=True
            )
        output = await interpreter.drain()
        text = output.decode(errors="replace")
        return PythonResult(output=text, error=error, cut=interpreter.cut)

    async def _started(self) -> SandboxProcess:
        if self._interpreter is None:
            # A reply must fit into the head that the supervisor passes on.
            max_reply = self.box.settings.limits.max_output_bytes // 2 - LENGTH.size
            argv = [*self.python, "-c", REPL_PROGRAM.read_text(), str(max_reply)]
            self._interpreter = await self.box.spawn(argv, env=self.env)
            self._buffer = b""
        return self._interpreter

    async def _read_reply(self, interpreter: SandboxProcess) -> str | None:
        while True:
            if len(self._buffer) >= LENGTH.size:
                (size,) = LENGTH.unpack_from(self._buffer)
                end = LENGTH.size + size
                if len(self._buffer) >= end:
                    reply = self._buffer[LENGTH.size : end]
                    self._buffer = self._buffer[end:]
                    return reply.decode(errors="replace")
            more = await interpreter.read("stderr")
            if not more:
                return None
            self._buffer += more

    async def _end(self, interpreter: SandboxProcess) -> bytes:
        """Kill the interpreter and return what it had printed."""
        await interpreter.kill()
        try:
            async with asyncio.timeout(GRACE_S):
                await interpreter.wait()
        except TimeoutError:
            raise SandboxError("the interpreter survived SIGKILL") from None
        self._interpreter = None
        return await interpreter.drain()

    async def close(self) -> None:
        if self._interpreter is not None:
            await self._interpreter.kill()
            self._interpreter = None
