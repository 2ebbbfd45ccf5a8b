"""HTTP/1.1 client with a connection pool, for many concurrent requests.

The cost of a request does not depend on the number of requests in flight. Client libraries iterate
over all open connections whenever one is acquired or released; with some dozens of requests in
flight that costs as much as everything else that a gateway does (benchmarks/rl_gateway.py).
Only what engines need is implemented: POST and GET, bodies by length or in chunks, a timeout for
every wait. Leaving a response before its end closes its connection, which tells the engine that the
request is cancelled.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S = 60.0  # generous for busy machines; health checks detect dead servers
MAX_HEADER_BYTES = 1 << 18  # of a response head, or of a line of the chunked framing

_T = TypeVar("_T")
Origin = tuple[str, str, int]  # scheme, host, port


class PooledResponse:
    """A response whose head has been read."""

    def __init__(self, connection: "_Connection", head: bytes, timeout_s: float) -> None:
        lines = head.decode("latin-1").split("\r\n")
        version, status, *_ = f"{lines[0]} ".split(" ", 2)
        if not version.startswith("HTTP/1.") or not status.isdecimal():
            raise OSError(f"not an HTTP response: {lines[0]!r:.80}")
        self.status = int(status)
        pairs = (line.partition(":") for line in lines[1:] if line)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self.complete = False  # read to its end, so the connection can be reused
        self._connection, self._timeout_s = connection, timeout_s

    @property
    def is_reusable(self) -> bool:
        return self.complete and self.headers.get("connection", "").lower() != "close"

    async def read(self) -> bytes:
        return b"".join([part async for part in self.iter_bytes()])

    async def iter_lines(self) -> AsyncGenerator[bytes, None]:
        """Lines of the body, as they arrive."""
        rest = b""
        async for part in self.iter_bytes():
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                yield line
        if rest:
            yield rest

    async def iter_bytes(self) -> AsyncGenerator[bytes, None]:
        """Parts of the body, as they arrive."""
        reader, length = self._connection.reader, self.headers.get("content-length")
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            while size := _parse_length((await self._line()).partition(b";")[0], 16):
                yield (await self._wait(reader.readexactly(size + 2)))[:-2]
            while await self._line():
                pass  # trailers
        elif length is not None:
            if size := _parse_length(length.encode(), 10):
                yield await self._wait(reader.readexactly(size))
        else:
            while part := await self._wait(reader.read(1 << 16)):
                yield part
            return  # the body ends with the connection
        self.complete = True

    async def _line(self) -> bytes:
        return (await self._wait(_until(self._connection.reader, b"\n"))).strip()

    async def _wait(self, reading: Awaitable[_T]) -> _T:
        async with asyncio.timeout(self._timeout_s):
            return await reading


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.used = False

    @property
    def open(self) -> bool:
        return not (self.writer.is_closing() or self.reader.at_eof())

    async def send(self, data: bytes, timeout_s: float) -> bytes:
        """Send a request; the head of the response."""
        async with asyncio.timeout(timeout_s):
            self.writer.write(data)
            await self.writer.drain()
            return await _until(self.reader, b"\r\n\r\n")


class ConnectionPool:
    """Async context manager that closes idle connections at the end. Connection errors and timeouts
    raise OSError (including TimeoutError) or EOFError."""

    def __init__(self, idle: int = 1024) -> None:
        self._max_idle = idle  # per origin
        self._idle: dict[Origin, list[_Connection]] = {}
        self._tls: ssl.SSLContext | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.writer.close()
        self._idle.clear()

    @asynccontextmanager
    async def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes = b"",
        timeout_s: float,
    ) -> AsyncIterator[PooledResponse]:
        """The response, with its body still to be read. Every wait is limited to `timeout_s`."""
        origin, host, target = _address(url)
        data = _head(f"{method} {target} HTTP/1.1", host, headers, len(body)) + body
        connection, head = await self._send(origin, data, timeout_s)
        response = None
        try:
            response = PooledResponse(connection, head, timeout_s)
            yield response
        finally:
            kept = self._idle.setdefault(origin, [])
            if response is not None and response.is_reusable and len(kept) < self._max_idle:
                kept.append(connection)
            else:
                connection.writer.transport.abort()

    async def _send(
        self, origin: Origin, data: bytes, timeout_s: float
    ) -> tuple[_Connection, bytes]:
        while True:
            connection = await self._connection(origin, timeout_s)
            try:
                head = await connection.send(data, timeout_s)
            except (EOFError, ConnectionError) as error:
                connection.writer.transport.abort()
                # A server may close an idle connection at any time, before it read the request.
                if connection.used and not getattr(error, "partial", b""):
                    continue
                raise
            except BaseException:
                connection.writer.transport.abort()
                raise
            connection.used = True
            return connection, head

    async def _connection(self, origin: Origin, timeout_s: float) -> _Connection:
        kept = self._idle.get(origin, [])
        while kept:
            connection = kept.pop()
            if connection.open:
                return connection
        scheme, host, port = origin
        if scheme == "https" and self._tls is None:
            self._tls = ssl.create_default_context()
        tls = self._tls if scheme == "https" else None
        limit = min(CONNECT_TIMEOUT_S, timeout_s)
        try:
            async with asyncio.timeout(limit):
                opened = await asyncio.open_connection(host, port, ssl=tls, limit=MAX_HEADER_BYTES)
        except TimeoutError:
            raise ConnectionError(f"connection timed out after {limit:g} s") from None
        return _Connection(*opened)


async def _until(reader: asyncio.StreamReader, end: bytes) -> bytes:
    try:
        return await reader.readuntil(end)
    except asyncio.LimitOverrunError:
        raise OSError(
            f"invalid HTTP response: no {end!r} within {MAX_HEADER_BYTES} bytes"
        ) from None


def _parse_length(text: bytes, base: int) -> int:
    try:
        return int(text, base)
    except ValueError:
        raise OSError(f"invalid HTTP response: {text!r:.80} is not a length") from None


@lru_cache(maxsize=1024)
def _address(url: str) -> tuple[Origin, str, str]:
    """Origin, Host header and request target of a URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r:.200} is not an HTTP URL")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    path = parts.path or "/"
    target = f"{path}?{parts.query}" if parts.query else path
    return (parts.scheme, parts.hostname, port), parts.netloc.rpartition("@")[2], target


def _head(line: str, host: str, headers: Mapping[str, str], length: int) -> bytes:
    lines = [line, f"Host: {host}", f"Content-Length: {length}"]
    for name, value in headers.items():
        if "\r" in value or "\n" in value:
            raise ValueError(f"header {name}: {value!r:.80} has a line break")
        lines.append(f"{name}: {value}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")
