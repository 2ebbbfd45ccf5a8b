"""Host side of the connection to a sandbox's supervisor."""

import asyncio
import contextlib
import marshal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paddock.sandbox.sandbox import SandboxError
from paddock.sandbox.supervisor import EXIT, OUTPUT, READY, REPLY, REQUEST, STOPPED

StreamName = Literal["stdout", "stderr"]
_STREAMS: dict[StreamName, int] = {"stdout": 0, "stderr": 1}
GRACE_S = 10.0  # for requests that the supervisor answers immediately


@dataclass(slots=True)
class HeadTailOutput:
    """Received part of one output stream: head, tail, and the number of bytes between them."""

    head: bytearray = field(default_factory=bytearray)
    tail: bytes = b""
    lost: int = 0

    def text(self) -> bytes:
        """Head and tail, with a note of what was dropped.

        >>> HeadTailOutput(bytearray(b"abc"), b"xyz", 20).text()
        b'abc\\n... 20 bytes left out ...\\nxyz'
        """
        gap = f"\n... {self.lost} bytes left out ...\n".encode() if self.lost else b""
        return bytes(self.head) + gap + self.tail


class RemoteProcess:
    """A `SandboxProcess` behind a supervisor."""

    def __init__(self, channel: "SupervisorChannel", name: int) -> None:
        self.channel, self.name = channel, name
        self.outputs = (HeadTailOutput(), HeadTailOutput())
        self.code: int | None = None
        self.error: SandboxError | None = None
        self.synced = 0
        self.cut = False
        self._frame_arrived = asyncio.Event()

    async def write(self, data: bytes) -> None:
        await self.channel.send({"op": "stdin", "id": self.name, "eof": False}, data)

    async def read(self, stream: StreamName) -> bytes:
        output = self.outputs[_STREAMS[stream]]
        while not output.head and self.code is None:
            await self._wait_for_frame()
        return self._take(output)

    async def drain(self) -> bytes:
        if self.code is None:
            before = self.synced
            await self.channel.send({"op": "sync", "id": self.name})
            async with asyncio.timeout(GRACE_S):
                while self.synced == before and self.code is None:
                    await self._wait_for_frame()
        self.cut = bool(self.outputs[0].lost)
        return self._take(self.outputs[0])

    async def kill(self, *, children_only: bool = False) -> None:
        await self.channel.send({"op": "kill", "id": self.name, "children": children_only})

    async def wait(self) -> int:
        while self.code is None:
            await self._wait_for_frame()
        return self.code

    def on_frame(self, kind: int, number: int, counts: Sequence[int], data: bytes) -> None:
        if kind == OUTPUT:
            self.outputs[number - 1].head.extend(data)
        else:
            for output, lost, size in zip(self.outputs, counts[:2], counts[2:], strict=True):
                output.lost, output.tail, data = lost, data[:size], data[size:]
            self.code = number if kind == EXIT else None
            self.synced += 1
        self._frame_arrived.set()

    def fail(self, error: SandboxError) -> None:
        self.error = error
        self._frame_arrived.set()

    async def _wait_for_frame(self) -> None:
        if self.error is not None:
            raise self.error
        self._frame_arrived.clear()
        await self._frame_arrived.wait()

    @staticmethod
    def _take(output: HeadTailOutput) -> bytes:
        data = output.text()
        output.head.clear()
        output.tail, output.lost = b"", 0
        return data


class SupervisorChannel:
    """Frames to and from a supervisor.

    Not bound to an event loop: the loop that sends a request also receives, so that a sandbox can
    be warmed in one loop and used in another.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.ready = asyncio.Event()
        self.stopped = asyncio.Event()
        self.alive = True  # until the connection ends
        self.closed = False
        self._jobs: dict[int, RemoteProcess] = {}
        self._count = 0
        self._inbox = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: asyncio.Task[None] | None = None
        self._send_lock = asyncio.Lock()

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str],
        user: str | int | None,
        stdin: bytes | None = None,
        head_bytes: int | None = None,
    ) -> RemoteProcess:
        """Start a process.

        With `stdin` given, its standard input is closed afterwards. `head_bytes` is how much of
        each output is passed on; None is the supervisor's default.
        """
        self._count += 1
        job = self._jobs[self._count] = RemoteProcess(self, self._count)
        request = {"op": "spawn", "id": job.name, "eof": stdin is not None}
        request |= {"head_bytes": head_bytes, "argv": list(argv), "cwd": cwd}
        request |= {"env": dict(env), "user": user}
        await self.send(request, stdin or b"")
        return job

    async def send(self, request: Mapping[str, Any], data: bytes = b"") -> None:
        """Send a request to the supervisor. Raises SandboxError if it is gone."""
        self.receive()
        head = marshal.dumps(dict(request))
        loop = asyncio.get_running_loop()
        async with self._send_lock:
            try:
                frame = REQUEST.pack(len(head), len(data)) + head + data
                await loop.sock_sendall(self.connection, frame)
            except OSError as error:
                raise SandboxError(f"the sandbox is gone ({error.strerror})") from error

    def receive(self) -> None:
        """Make the running event loop the one that receives frames."""
        if self.closed:
            raise SandboxError("the sandbox is closed")
        loop = asyncio.get_running_loop()
        if self._loop is not loop or self._listener is None:
            self._loop, self._send_lock = loop, asyncio.Lock()
            self.stopped = asyncio.Event()
            if self.ready.is_set():
                self.ready = asyncio.Event()
                self.ready.set()
            self._listener = loop.create_task(self._listen())

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while data := await loop.sock_recv(self.connection, 1 << 18):
                self._inbox += data
                self._dispatch_frames()
        except OSError:
            pass
        self.alive = False
        for job in self._jobs.values():
            job.fail(SandboxError("the sandbox died"))
        self._jobs.clear()
        self.ready.set()
        self.stopped.set()

    def _dispatch_frames(self) -> None:
        while len(self._inbox) >= REPLY.size:
            kind, name, number, *counts, size = REPLY.unpack_from(self._inbox)
            end = REPLY.size + size
            if len(self._inbox) < end:
                return
            data = bytes(self._inbox[REPLY.size : end])
            del self._inbox[:end]
            if kind == READY:
                self.ready.set()
            elif kind == STOPPED:
                self.stopped.set()
            elif (job := self._jobs.get(name)) is not None:
                job.on_frame(kind, number, counts, data)
                if kind == EXIT:
                    del self._jobs[name]

    async def stop_all(self, op: Literal["stop", "kill_all"]) -> None:
        """Stop or kill every process inside and wait until it is done."""
        self.stopped.clear()
        await self.send({"op": op})
        try:
            async with asyncio.timeout(GRACE_S):
                while not self.stopped.is_set():
                    if not self.alive:
                        raise SandboxError("the sandbox died")
                    await self.stopped.wait()
        except TimeoutError:
            raise SandboxError("the sandbox does not respond") from None

    async def close(self) -> None:
        self.closed = True
        listener, self._listener = self._listener, None
        if listener is not None and self._loop is asyncio.get_running_loop():
            listener.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listener
        for job in self._jobs.values():
            job.fail(SandboxError("the sandbox was closed"))
        self._jobs.clear()
        self.connection.close()
