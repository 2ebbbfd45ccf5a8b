"""JSON-lines connection to the programs of sandboxed.py."""

import asyncio
import json
import time
from functools import cache
from pathlib import Path
from typing import Any, Literal

from paddock.sandbox import Sandbox, SandboxError, SandboxProcess

SANDBOXED_PROGRAM = Path(__file__).with_name("sandboxed.py")
MAX_REPLY_BYTES = 4 << 20  # of all replies of a program together


class ChannelError(Exception):
    """The program exited, timed out, replied too much, or sent an invalid reply."""


class SandboxLost(ChannelError):
    """The sandbox of the program is gone or does not respond."""


class JsonLinesChannel:
    """Sends requests as lines of JSON and reads one line for each.

    `seconds` is the timeout of all replies together; only the time spent waiting counts.
    """

    def __init__(self, box: Sandbox, role: Literal["solution", "tests"], seconds: float) -> None:
        self._box, self._role, self._seconds = box, role, seconds
        self._seconds_left, self._bytes_left = seconds, MAX_REPLY_BYTES
        self._process: SandboxProcess | None = None
        self._buffer = bytearray()

    async def request(self, message: dict[str, Any]) -> dict[str, Any]:
        """The reply to a message; starts the program first if necessary.

        Raises ChannelError, or SandboxLost if the sandbox itself failed.
        """
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._seconds_left):
                if self._process is None:
                    argv = [*self._box.python, "-I", "-c", _program(), self._role]
                    self._process = await self._box.spawn(argv)
                await self._process.write(json.dumps(message).encode() + b"\n")
                reply = json.loads(await self._read_line(self._process))
        except TimeoutError:
            raise ChannelError(f"over {self._seconds:g} s") from None
        except SandboxError as error:
            raise SandboxLost(str(error)) from error
        except (ValueError, RecursionError):
            raise ChannelError("invalid reply") from None
        finally:
            self._seconds_left -= time.monotonic() - started
        if not isinstance(reply, dict):
            raise ChannelError("invalid reply")
        return reply

    async def _read_line(self, process: SandboxProcess) -> bytes:
        while b"\n" not in self._buffer:
            more = await process.read("stdout")
            if not more:
                raise ChannelError("the program ended before its tests did")
            self._bytes_left -= len(more)
            if self._bytes_left < 0:
                raise ChannelError(f"reply larger than {MAX_REPLY_BYTES} bytes")
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        return bytes(line)


@cache
def _program() -> str:
    return SANDBOXED_PROGRAM.read_text()
