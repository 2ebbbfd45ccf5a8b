"""Our end of the line to a sandbox's runner."""

import asyncio
import contextlib
import marshal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paddock.sandbox.sandbox import SandboxError
from paddock.sandbox.supervisor import ASK, EXIT, OUT, READY, SAY, STOPPED

StreamName = Literal["stdout", "stderr"]
_STREAMS: dict[StreamName, int] = {"stdout": 0, "stderr": 1}
GRACE_S = 10.0  # for the runner to answer what it answers at once


@dataclass(slots=True)
class HeadTailOutput:
    """What was heard of one output: its beginning, its end, and how much was between."""

    head: bytearray = field(default_factory=bytearray)
    tail: bytes = b""
    lost: int = 0

    def text(self) -> bytes:
        """
        >>> HeadTailOutput(bytearray(b"abc"), b"xyz", 20).text()
        b'abc\\n... 20 bytes left out ...\\nxyz'
        """
        gap = f"\n... {self.lost} bytes left out ...\n".encode() if self.lost else b""
        return bytes(self.head) + gap + self.tail


class RemoteProcess:
    """A process inside, as seen from outside; a `Process`."""

    def __init__(self, channel: "SupervisorChannel", name: int) -> None:
        self.channel, self.name = channel, name
        self.written = (HeadTailOutput(), HeadTailOutput())
        self.code: int | None = None
        self.broken: SandboxError | None = None
        self.synced = 0
        self.cut = False
        self._news = asyncio.Event()

    async def write(self, data: bytes) -> None:
        await self.channel.send({"ask": "feed", "id": self.name, "last": False}, data)

    async def read(self, stream: StreamName) -> bytes:
        written = self.written[_STREAMS[stream]]
        while not written.head and self.code is None:
            await self._change()
        return self._take(written)

    async def drain(self) -> bytes:
        if self.code is None:
            before = self.synced
            await self.channel.send({"ask": "sync", "id": self.name})
            async with asyncio.timeout(GRACE_S):
                while self.synced == before and self.code is None:
                    await self._change()
        self.cut = bool(self.written[0].lost)
        return self._take(self.written[0])

    async def kill(self, *, children_only: bool = False) -> None:
        await self.channel.send({"ask": "kill", "id": self.name, "children": children_only})

    async def wait(self) -> int:
        while self.code is None:
            await self._change()
        return self.code

    def on_frame(self, what: int, number: int, counts: Sequence[int], data: bytes) -> None:
        if what == OUT:
            self.written[number - 1].head.extend(data)
        else:
            for written, lost, size in zip(self.written, counts[:2], counts[2:], strict=True):
                written.lost, written.tail, data = lost, data[:size], data[size:]
            self.code = number if what == EXIT else None
            self.synced += 1
        self._news.set()

    def fail(self, error: SandboxError) -> None:
        self.broken = error
        self._news.set()

    async def _change(self) -> None:
        if self.broken is not None:
            raise self.broken
        self._news.clear()
        await self._news.wait()

    @staticmethod
    def _take(written: HeadTailOutput) -> bytes:
        data = written.text()
        written.head.clear()
        written.tail, written.lost = b"", 0
        return data


class SupervisorChannel:
    """Frames to and from a runner. Belongs to no event loop: whichever one asks something also
    listens, so that a sandbox can be warmed in one loop and used in another."""

    def __init__(self, line: socket.socket) -> None:
        line.setblocking(False)
        self.line = line
        self.ready = asyncio.Event()
        self.stopped = asyncio.Event()
        self.alive = True  # as far as we have heard
        self.closed = False
        self._jobs: dict[int, RemoteProcess] = {}
        self._count = 0
        self._inbox = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str],
        user: str | int | None,
        stdin: bytes | None = None,
        room: int | None = None,
    ) -> RemoteProcess:
        """With `stdin` given, nothing more can be written to it. `room`: bytes kept of outputs."""
        self._count += 1
        job = self._jobs[self._count] = RemoteProcess(self, self._count)
        how = {"argv": list(argv), "cwd": cwd, "env": dict(env), "user": user}
        head = {"ask": "spawn", "id": job.name, "last": stdin is not None, "room": room, **how}
        await self.send(head, stdin or b"")
        return job

    async def send(self, head: Mapping[str, Any], data: bytes = b"") -> None:
        self.receive()
        text = marshal.dumps(dict(head))
        loop = asyncio.get_running_loop()
        async with self._turn:
            try:
                await loop.sock_sendall(self.line, ASK.pack(len(text), len(data)) + text + data)
            except OSError as error:
                raise SandboxError(f"the sandbox is gone ({error.strerror})") from error

    def receive(self) -> None:
        if self.closed:
            raise SandboxError("the sandbox is closed")
        loop = asyncio.get_running_loop()
        if self._loop is not loop or self._listener is None:
            self._loop, self._turn = loop, asyncio.Lock()
            self.stopped = asyncio.Event()
            if self.ready.is_set():
                self.ready = asyncio.Event()
                self.ready.set()
            self._listener = loop.create_task(self._listen())

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while data := await loop.sock_recv(self.line, 1 << 18):
                self._inbox += data
                self._frames()
        except OSError:
            pass
        self.alive = False
        for job in self._jobs.values():
            job.fail(SandboxError("the sandbox died"))
        self._jobs.clear()
        self.ready.set()
        self.stopped.set()

    def _frames(self) -> None:
        while len(self._inbox) >= SAY.size:
            what, name, number, *counts, size = SAY.unpack_from(self._inbox)
            end = SAY.size + size
            if len(self._inbox) < end:
                return
            data = bytes(self._inbox[SAY.size : end])
            del self._inbox[:end]
            if what == READY:
                self.ready.set()
            elif what == STOPPED:
                self.stopped.set()
            elif (job := self._jobs.get(name)) is not None:
                job.on_frame(what, number, counts, data)
                if what == EXIT:
                    del self._jobs[name]

    async def stop_all(self, how: Literal["stop", "end"]) -> None:
        """Stop or end every process inside."""
        self.stopped.clear()
        await self.send({"ask": how})
        try:
            async with asyncio.timeout(GRACE_S):
                while not self.stopped.is_set():
                    if not self.alive:
                        raise SandboxError("the sandbox died")
                    await self.stopped.wait()
        except TimeoutError:
            raise SandboxError("the sandbox does not answer") from None

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
        self.line.close()
