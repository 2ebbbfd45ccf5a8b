"""Asyncio interface of engines: awaited outputs and streams on top of `submit` and `abort`."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Protocol, Self
from weakref import WeakKeyDictionary

from paddock.engine.request import OutputCallback, OutputDelta, Request, RequestOutput


class OutputInbox(Protocol):
    """Where the deltas of a request go; an asyncio.Queue is one."""

    def put_nowait(self, item: OutputDelta | Exception, /) -> None: ...


class StreamBridge:
    """Base class of engines: bridges the engine thread and asyncio event loops."""

    def __init__(self) -> None:
        self._mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = (
            WeakKeyDictionary()
        )

    def submit(self, request: Request, deliver: OutputCallback, *, streamed: bool = False) -> str:
        """Submit a request; returns its id. `deliver` must not block and receives one delta per
        step if `streamed`, else only the last, or an exception."""
        raise NotImplementedError

    def abort(self, request_id: str) -> None:
        """End a request that `submit` returned the id of. Does not block."""
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
        """The output of one request. Cancelling the task aborts the request."""
        async with aclosing(self._deltas(request, streamed=False)) as deltas:
            async for delta in deltas:
                if delta.output is not None:
                    return delta.output
        raise AssertionError("a stream ends with an output")

    async def stream(self, request: Request) -> AsyncGenerator[OutputDelta, None]:
        """Yield the delta of each step; the last one has the output. Leaving early aborts it."""
        async with aclosing(self._deltas(request, streamed=True)) as deltas:
            async for delta in deltas:
                yield delta

    def deliver_to(self, inbox: OutputInbox) -> OutputCallback:
        """A callback for `submit` that puts each delta into `inbox` in the running event loop."""
        loop = asyncio.get_running_loop()
        mailbox = self._mailboxes.setdefault(loop, _Mailbox())

        def deliver(delta: OutputDelta | Exception) -> None:
            mailbox.send(loop, inbox, delta)

        return deliver

    async def _deltas(
        self, request: Request, *, streamed: bool
    ) -> AsyncGenerator[OutputDelta, None]:
        inbox: asyncio.Queue[OutputDelta | Exception] = asyncio.Queue()
        request_id, finished = (
            self.submit(request, self.deliver_to(inbox), streamed=streamed),
            False,
        )
        try:
            while not finished:
                delta = await inbox.get()
                finished = isinstance(delta, Exception) or delta.output is not None
                if isinstance(delta, Exception):
                    raise delta
                yield delta
        finally:
            if not finished:
                self.abort(request_id)


class _Mailbox:
    """Deltas for one event loop. The loop is woken once for all deltas that accumulate meanwhile: a
    wake-up costs more than a delta and makes the threads compete for the interpreter lock.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[OutputInbox, OutputDelta | Exception]] = deque()
        self._scheduled = False

    def send(
        self,
        loop: asyncio.AbstractEventLoop,
        inbox: OutputInbox,
        delta: OutputDelta | Exception,
    ) -> None:
        if loop.is_closed():
            return
        self._pending.append((inbox, delta))
        if not self._scheduled:
            self._scheduled = True
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._scheduled = False  # before draining: later deltas schedule another call
        while self._pending:
            inbox, delta = self._pending.popleft()
            inbox.put_nowait(delta)
