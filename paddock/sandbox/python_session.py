"""A Python interpreter that stays: what one piece of code defines, the next one sees."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paddock.sandbox.channel import GRACE_S
from paddock.sandbox.python_repl import LENGTH
from paddock.sandbox.sandbox import Sandbox, SandboxError, SandboxProcess

INSIDE = Path(__file__).with_name("python_repl.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonResult:
    output: str  # what was printed, and the value of a last expression as at the prompt
    error: str = ""  # a traceback
    timed_out: bool = False
    cut: bool = False  # more was printed than is kept: beginning and end are here
    restarted: bool = False  # the interpreter is gone; names defined before are too


class PythonSession:
    """Pieces of code, one after another, in one interpreter of a sandbox. One that ends or runs out
    of time is replaced by a fresh one, and the reply says so."""

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
        self._heard = b""

    async def run(self, code: str, timeout_s: float) -> PythonResult:
        interpreter = await self._started()
        source = code.encode(errors="replace")
        await interpreter.write(LENGTH.pack(len(source)) + source)
        try:
            async with asyncio.timeout(timeout_s):
                error = await self._answer(interpreter)
        except TimeoutError:
            output = await self._end(interpreter)
            what = f"TimeoutError: over {timeout_s:g} s; the interpreter was restarted"
            return PythonResult(
                output=output.decode(errors="replace"), error=what, timed_out=True, restarted=True
            )
        if error is None:
            output = await self._end(interpreter)
            what = f"the interpreter ended (exit code {await interpreter.wait()}) and was restarted"
            return PythonResult(output=output.decode(errors="replace"), error=what, restarted=True)
        output = await interpreter.drain()
        text = output.decode(errors="replace")
        return PythonResult(output=text, error=error, cut=interpreter.cut)

    async def _started(self) -> SandboxProcess:
        if self._interpreter is None:
            most = (
                self.box.settings.limits.max_output_bytes // 2 - LENGTH.size
            )  # see runner: `room`
            argv = [*self.python, "-c", INSIDE.read_text(), str(most)]
            self._interpreter = await self.box.spawn(argv, env=self.env)
            self._heard = b""
        return self._interpreter

    async def _answer(self, interpreter: SandboxProcess) -> str | None:
        while True:
            if len(self._heard) >= LENGTH.size:
                (size,) = LENGTH.unpack_from(self._heard)
                end = LENGTH.size + size
                if len(self._heard) >= end:
                    said = self._heard[LENGTH.size : end]
                    self._heard = self._heard[end:]
                    return said.decode(errors="replace")
            more = await interpreter.read("stderr")
            if not more:
                return None
            self._heard += more

    async def _end(self, interpreter: SandboxProcess) -> bytes:
        """Kill it; what it had printed."""
        await interpreter.kill()
        try:
            async with asyncio.timeout(GRACE_S):
                await interpreter.wait()
        except TimeoutError:
            raise SandboxError("an interpreter survived being killed") from None
        self._interpreter = None
        return await interpreter.drain()

    async def close(self) -> None:
        if self._interpreter is not None:
            await self._interpreter.kill()
            self._interpreter = None
