"""uvicorn with deadlines for connections that send or read nothing.

uvicorn closes a connection that stays idle after a response. It waits forever for one that never
sends a request, stops in the middle of one, or does not read its response; and it keeps headers of
any length. Bodies have their own deadline, where they are read (`paddock.api.dialect.body_of`).
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
    app: Any, deadlines: ConnectionTimeouts | None = None, **options: Any
) -> uvicorn.Config:
    """How all our servers run `app`; `options` are uvicorn's."""
    limits = deadlines or ConnectionTimeouts()

    class Protocol(_DeadlineProtocol):
        deadlines = limits

    defaults: dict[str, Any] = {"log_level": "warning", "access_log": False, "lifespan": "off"}
    # Nothing here speaks websockets.
    return uvicorn.Config(app, http=Protocol, ws="none", **(defaults | options))


class _DeadlineProtocol(HttpToolsProtocol):
    deadlines: ConnectionTimeouts

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._in_headers = False
        self._header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start("headers", self.deadlines.headers_s)

    def connection_lost(self, exc: Exception | None) -> None:
        for name in list(self._timers):
            self._stop(name)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        began_before = self._in_headers
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self._start("headers", self.deadlines.headers_s)
        else:  # a request is being answered
            self._stop("headers")
        if began_before and self._in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > self.deadlines.header_bytes:
                self.send_400_response("The headers are too long.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers, self._header_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._in_headers = False
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start("unread", self.deadlines.unread_s)

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
        self.transport.abort()  # there is nobody to wait for: closing would wait for the client
