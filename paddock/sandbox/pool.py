"""Sandboxes that are started before they are needed. Each is used once."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from paddock.sandbox.backend import open_sandbox
from paddock.sandbox.sandbox import FilesystemSnapshot, Sandbox, SandboxSettings


class SandboxPool:
    """`warm` sandboxes are kept ready, and started as many at a time. Without any event loop at
    first, and usable from one loop after another: what waits in it belongs to none."""

    def __init__(self, settings: SandboxSettings, *base: FilesystemSnapshot, warm: int = 2) -> None:
        self.settings, self.base, self.warm = settings, base, warm
        self._ready: list[Sandbox] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def fill(self) -> None:
        """Wait until all that should be warm is."""
        self._begin()
        while self._starting:
            await asyncio.gather(*self._starting)

    async def take(self) -> Sandbox:
        """A started sandbox, the caller's own; another begins to warm in its place."""
        box = self._ready.pop() if self._ready else None
        self._begin()
        if box is None:
            box = open_sandbox(self.settings, *self.base)
            await box.start()
        return box

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Sandbox]:
        """A sandbox for as long as the block lasts."""
        box = await self.take()
        try:
            yield box
        finally:
            await asyncio.shield(box.close())

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # tasks of a loop that has ended will never end
            self._loop, self._starting = loop, set()
        for _ in range(self.warm - len(self._ready) - len(self._starting)):
            self._keep(self._start())

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start(self) -> None:
        box = open_sandbox(self.settings, *self.base)
        # One that does not start is no loss: whoever takes a box then starts it and hears why.
        with contextlib.suppress(ValueError, OSError):
            await box.start()
            self._ready.append(box)

    async def close(self) -> None:
        """Let the warm ones go. Those taken are their takers'."""
        for task in list(self._starting):
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        boxes, self._ready = self._ready, []
        await asyncio.gather(*(box.close() for box in boxes))
