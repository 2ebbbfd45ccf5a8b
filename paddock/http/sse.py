"""Server-sent events, and cancellation when a client disconnects."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from paddock.records import json_codec

DONE = b"data: [DONE]\n\n"

_T = TypeVar("_T")


class ClientDisconnected(Exception):
    """The client disconnected before the response was complete."""


def encode_event(payload: dict[str, Any], *, named: bool = False) -> bytes:
    """One event; with `named` its type is also sent on an `event:` line.

    >>> encode_event({"type": "ping"}, named=True)
    b'event: ping\\ndata: {"type":"ping"}\\n\\n'
    """
    name = b"event: " + str(payload["type"]).encode() + b"\n" if named else b""
    return name + b"data: " + json_codec.json_bytes(payload) + b"\n\n"


async def cancel_on_disconnect(request: Request, work: Awaitable[_T]) -> _T:
    """The result of `work`, which is cancelled if the client disconnects first. The request body
    must have been read."""
    running = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({running, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise ClientDisconnected
        return running.result()
    finally:
        for task in (running, disconnect):
            task.cancel()
        await asyncio.gather(running, disconnect, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventSourceResponse(StreamingResponse):
    """A stream that ends when the client disconnects, even while there is nothing to send."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self.stream_response(send))
        disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({sending, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except OSError:
            pass  # the client disconnected during a write
        finally:
            for task in (sending, disconnect):
                task.cancel()
            await asyncio.gather(sending, disconnect, return_exceptions=True)
            close = getattr(self.body_iterator, "aclose", None)
            if close is not None:
                await close()


class TrackedJSONResponse(Response):
    """A JSON value. `received` is called if the client was still connected, `over` in any case."""

    media_type = "application/json"

    def __init__(
        self, value: Any, *, received: Callable[[], object], over: Callable[[], object]
    ) -> None:
        super().__init__(json_codec.json_bytes(value))
        self._received, self._over = received, over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await asyncio.sleep(0)  # so that an earlier disconnect is noticed
            if not disconnect.done():
                await super().__call__(scope, receive, send)
                # Nothing else ran since the last byte was written: the end of the response,
                # which also reads as a disconnect, has not been received yet.
                if not disconnect.done():
                    self._received()
        finally:
            self._over()
            disconnect.cancel()
            await asyncio.gather(disconnect, return_exceptions=True)


async def prefetch_first(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same events, after the first one is available: an error before it can still be reported
    with its own status."""
    first = await anext(events, None)

    async def all_events() -> AsyncIterator[bytes]:
        try:
            if first is not None:
                yield first
            async for each in events:
                yield each
        finally:
            close = getattr(events, "aclose", None)
            if close is not None:
                await close()

    return all_events()
