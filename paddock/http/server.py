"""uvicorn with timeouts for connections that send or read nothing.

uvicorn closes a connection that stays idle after a response. It waits forever for one that never
sends a request, stops in the middle of one, or does not read its response; and it keeps headers of
any length. Bodies have their own timeout, where they are read (`paddock.http.router.read_body`).
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionTimeouts:
    """Seconds after which a connection is closed."""

    headers_s: float = 30.0  # without a whole request line and headers
    unread_s: float = 300.0  # with a response that the client does not read
    header_bytes: int = 1 << 16


def uvicorn_config(
    app: Any, timeouts: ConnectionTimeouts | None = None, **options: Any
) -> uvicorn.Config:
    """Configuration of every server of this project; `options` are passed to uvicorn."""
    limits = timeouts or ConnectionTimeouts()

    class Protocol(_TimeoutProtocol):
        timeouts = limits

    defaults: dict[str, Any] = {"log_level": "warning", "access_log": False, "lifespan": "off"}
    # No route uses websockets.
    return uvicorn.Config(app, http=Protocol, ws="none", **(defaults | options))


class _TimeoutProtocol(HttpToolsProtocol):
    timeouts: ConnectionTimeouts

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._in_headers = False
        self._header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start("headers", self.timeouts.headers_s)

    def connection_lost(self, exc: Exception | None) -> None:
        for name in list(self._timers):
            self._stop(name)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_in_headers = self._in_headers
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self._start("headers", self.timeouts.headers_s)
        else:  # a request is being handled
            self._stop("headers")
        if was_in_headers and self._in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > self.timeouts.header_bytes:
                self.send_400_response("Request headers too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers, self._header_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._in_headers = False
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start("unread", self.timeouts.unread_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop("unread")

    def _start(self, name: str, seconds: float) -> None:
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, self._expired)

    def _stop(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def _expired(self) -> None:
        self.transport.abort()  # not close(), which would wait for the client
