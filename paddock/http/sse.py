"""Server-sent events, and clients that leave."""

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
    """Nobody waits for the answer any more."""


def encode_event(payload: dict[str, Any], *, named: bool = False) -> bytes:
    """One event; `named` also puts its type on a line of its own.

    >>> encode_event({"type": "ping"}, named=True)
    b'event: ping\\ndata: {"type":"ping"}\\n\\n'
    """
    name = b"event: " + str(payload["type"]).encode() + b"\n" if named else b""
    return name + b"data: " + json_codec.json_bytes(payload) + b"\n\n"


async def cancel_on_disconnect(request: Request, work: Awaitable[_T]) -> _T:
    """The outcome of `work`, which is cancelled if the client leaves first. The request's body must
    have been read."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientDisconnected
        return doing.result()
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventSourceResponse(StreamingResponse):
    """A stream that ends when the client leaves, even while there is nothing to send."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self.stream_response(send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except OSError:
            pass  # the client left while it was being sent to
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            close = getattr(self.body_iterator, "aclose", None)
            if close is not None:
                await close()


class TrackedJSONResponse(Response):
    """A JSON value; `received` is called when it was sent to a client that was still there, `over`
    in any case."""

    media_type = "application/json"

    def __init__(
        self, value: Any, *, received: Callable[[], object], over: Callable[[], object]
    ) -> None:
        super().__init__(json_codec.json_bytes(value))
        self._received, self._over = received, over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.sleep(0)  # so that a client that has left already is noticed
            if not leaving.done():
                await super().__call__(scope, receive, send)
                # Nothing else ran since the last byte was handed over: the answer's own end, which
                # also reads as leaving, has not been seen yet.
                if not leaving.done():
                    self._received()
        finally:
            self._over()
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)


async def prefetch_first(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same events, once there is a first one: what goes wrong before is an error of its own,
    with a status."""
    first = await anext(events, None)

    async def all_of_them() -> AsyncIterator[bytes]:
        try:
            if first is not None:
                yield first
            async for each in events:
                yield each
        finally:
            close = getattr(events, "aclose", None)
            if close is not None:
                await close()

    return all_of_them()
