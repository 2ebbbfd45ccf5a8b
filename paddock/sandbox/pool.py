"""Pool of warm sandboxes, each used once."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from paddock.sandbox.backend import open_sandbox
from paddock.sandbox.sandbox import FilesystemSnapshot, Sandbox, SandboxSettings


class SandboxPool:
    """Keeps `warm` started sandboxes ready.

    Needs no event loop when it is made and can be used from several loops, one after another: the
    waiting sandboxes are bound to none.
    """

    def __init__(self, settings: SandboxSettings, *base: FilesystemSnapshot, warm: int = 2) -> None:
        self.settings, self.base, self.warm = settings, base, warm
        self._ready: list[Sandbox] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def fill(self) -> None:
        """Start the missing warm sandboxes and wait for them."""
        self._refill()
        while self._starting:
            await asyncio.gather(*self._starting)

    async def take(self) -> Sandbox:
        """A started sandbox, which the caller must close. Starts a replacement."""
        box = self._ready.pop() if self._ready else None
        self._refill()
        if box is None:
            box = open_sandbox(self.settings, *self.base)
            await box.start()
        return box

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Sandbox]:
        """A sandbox for the duration of the block."""
        box = await self.take()
        try:
            yield box
        finally:
            await asyncio.shield(box.close())

    def _refill(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # tasks of a previous loop will never finish
            self._loop, self._starting = loop, set()
        for _ in range(self.warm - len(self._ready) - len(self._starting)):
            self._add_task(self._start())

    def _add_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start(self) -> None:
        box = open_sandbox(self.settings, *self.base)
        # A failure is ignored here: `take` then starts a sandbox itself and raises the reason.
        with contextlib.suppress(ValueError, OSError):
            await box.start()
            self._ready.append(box)

    async def close(self) -> None:
        """Close the warm sandboxes. Those that were taken belong to the callers."""
        for task in list(self._starting):
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        boxes, self._ready = self._ready, []
        await asyncio.gather(*(box.close() for box in boxes))
