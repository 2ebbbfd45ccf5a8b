"""Our end of the lines to the programs of `inside`."""

import asyncio
import json
import time
from functools import cache
from pathlib import Path
from typing import Any, Literal

from paddock.sandbox import Sandbox, SandboxError, SandboxProcess

SANDBOXED_PROGRAM = Path(__file__).with_name("sandboxed.py")
MAX_REPLY_BYTES = 4 << 20  # of all that a program may say


class ChannelError(Exception):
    """A program that ended, ran out of time, said too much, or said what cannot be read."""


class SandboxLost(ChannelError):
    """The program's whole sandbox is gone or does not answer."""


class JsonLinesChannel:
    """A line of JSON to a program and one back. Time counts only while it is waited for: `seconds`
    are for all replies together."""

    def __init__(self, box: Sandbox, role: Literal["answer", "judge"], seconds: float) -> None:
        self._box, self._role, self._seconds = box, role, seconds
        self._left, self._room = seconds, MAX_REPLY_BYTES
        self._process: SandboxProcess | None = None
        self._heard = bytearray()

    async def request(self, message: dict[str, Any]) -> dict[str, Any]:
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._left):
                if self._process is None:
                    argv = [*self._box.python, "-I", "-c", _program(), self._role]
                    self._process = await self._box.spawn(argv)
                await self._process.write(json.dumps(message).encode() + b"\n")
                reply = json.loads(await self._next(self._process))
        except TimeoutError:
            raise ChannelError(f"over {self._seconds:g} s") from None
        except SandboxError as error:
            raise SandboxLost(str(error)) from error
        except (ValueError, RecursionError):
            raise ChannelError("it said what cannot be read") from None
        finally:
            self._left -= time.monotonic() - began
        if not isinstance(reply, dict):
            raise ChannelError("it said what cannot be read")
        return reply

    async def _next(self, process: SandboxProcess) -> bytes:
        while b"\n" not in self._heard:
            more = await process.read("stdout")
            if not more:
                raise ChannelError("the program ended before its tests did")
            self._room -= len(more)
            if self._room < 0:
                raise ChannelError(f"it said more than {MAX_REPLY_BYTES} bytes")
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        return bytes(line)


@cache
def _program() -> str:
    return SANDBOXED_PROGRAM.read_text()
