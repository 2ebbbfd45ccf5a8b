"""Our end of the lines to the programs of `inside`."""

import asyncio
import json
import time
from functools import cache
from pathlib import Path
from typing import Any, Literal

from paddock.envs.sandbox import Process, Sandbox, SandboxError

INSIDE = Path(__file__).with_name("inside.py")
MOST_BYTES = 4 << 20  # of all that a program may say


class LineError(Exception):
    """A program that ended, ran out of time, said too much, or said what cannot be read."""


class SandboxLost(LineError):
    """The program's whole sandbox is gone or does not answer."""


class Line:
    """A line of JSON to a program and one back. Time counts only while it is waited for: `seconds`
    are for all replies together."""

    def __init__(self, box: Sandbox, role: Literal["answer", "judge"], seconds: float) -> None:
        self._box, self._role, self._seconds = box, role, seconds
        self._left, self._room = seconds, MOST_BYTES
        self._process: Process | None = None
        self._heard = bytearray()

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._left):
                if self._process is None:
                    argv = [*self._box.python, "-I", "-c", _program(), self._role]
                    self._process = await self._box.spawn(argv)
                await self._process.write(json.dumps(message).encode() + b"\n")
                reply = json.loads(await self._next(self._process))
        except TimeoutError:
            raise LineError(f"over {self._seconds:g} s") from None
        except SandboxError as error:
            raise SandboxLost(str(error)) from error
        except (ValueError, RecursionError):
            raise LineError("it said what cannot be read") from None
        finally:
            self._left -= time.monotonic() - began
        if not isinstance(reply, dict):
            raise LineError("it said what cannot be read")
        return reply

    async def _next(self, process: Process) -> bytes:
        while b"\n" not in self._heard:
            more = await process.read("stdout")
            if not more:
                raise LineError("the program ended before its tests did")
            self._room -= len(more)
            if self._room < 0:
                raise LineError(f"it said more than {MOST_BYTES} bytes")
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        return bytes(line)


@cache
def _program() -> str:
    return INSIDE.read_text()
