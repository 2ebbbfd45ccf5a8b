"""Asking an engine from asyncio, wherever the engine itself is."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Protocol, Self
from weakref import WeakKeyDictionary

from paddock.engine.request import OutputDelta, Request, RequestOutput

OutputCallback = Callable[[OutputDelta | Exception], None]


class OutputInbox(Protocol):
    """Where the deltas of a request go; an asyncio.Queue is one."""

    def put_nowait(self, item: OutputDelta | Exception, /) -> None: ...


class StreamBridge:
    """The base of engines: whole answers and streams, out of `submit` and `abort`."""

    def __init__(self) -> None:
        self._mail: WeakKeyDictionary[asyncio.AbstractEventLoop, _Mail] = WeakKeyDictionary()

    def submit(self, request: Request, deliver: OutputCallback, *, streamed: bool = False) -> str:
        """Hand in a request; returns its id. `deliver` must not block, and gets a delta a step if
        `streamed`, else the last one alone, or what went wrong."""
        raise NotImplementedError

    def abort(self, request_id: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def async_generate(self, request: Request) -> RequestOutput:
        """The answer to one request, in asyncio. Cancelling the task aborts the request."""
        async with aclosing(self._listen(request, streamed=False)) as deltas:
            async for delta in deltas:
                if delta.output is not None:
                    return delta.output
        raise AssertionError("a stream ends with an answer")

    async def stream(self, request: Request) -> AsyncGenerator[OutputDelta, None]:
        """What each step adds; the last delta carries the answer. Leaving early aborts it."""
        async with aclosing(self._listen(request, streamed=True)) as deltas:
            async for delta in deltas:
                yield delta

    def deliver_to(self, inbox: OutputInbox) -> OutputCallback:
        """A callback for `submit` that puts each delta into `inbox` in the running event loop."""
        loop = asyncio.get_running_loop()
        mail = self._mail.setdefault(loop, _Mail())

        def deliver(delta: OutputDelta | Exception) -> None:
            mail.send(loop, inbox, delta)

        return deliver

    async def _listen(
        self, request: Request, *, streamed: bool
    ) -> AsyncGenerator[OutputDelta, None]:
        inbox: asyncio.Queue[OutputDelta | Exception] = asyncio.Queue()
        name, over = self.submit(request, self.deliver_to(inbox), streamed=streamed), False
        try:
            while not over:
                delta = await inbox.get()
                over = isinstance(delta, Exception) or delta.output is not None
                if isinstance(delta, Exception):
                    raise delta
                yield delta
        finally:
            if not over:
                self.abort(name)


class _Mail:
    """What the engine's thread has for one event loop. The loop is woken once for all that piles up
    meanwhile: a wake-up costs more than a delta, and lets the loop's thread in between two of them.
    """

    def __init__(self) -> None:
        self._pile: deque[tuple[OutputInbox, OutputDelta | Exception]] = deque()
        self._called = False

    def send(
        self,
        loop: asyncio.AbstractEventLoop,
        inbox: OutputInbox,
        delta: OutputDelta | Exception,
    ) -> None:
        if loop.is_closed():
            return
        self._pile.append((inbox, delta))
        if not self._called:
            self._called = True
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        self._called = False  # before looking: who comes later calls again
        while self._pile:
            inbox, delta = self._pile.popleft()
            inbox.put_nowait(delta)
