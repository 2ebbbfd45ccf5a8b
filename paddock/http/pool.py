"""Many requests at once over HTTP/1.1 connections that are used again.

Written by hand for one property: a request costs the same whether ten or ten thousand are under
way. Client libraries look at every open connection whenever one is asked for or given back; with
some dozens under way that costs as much as all else that a gateway does
(benchmarks/rl_gateway.py).
Only what talking to engines takes is here: POST and GET, bodies by length or in chunks, a limit on
every wait. Leaving a response before its end closes its connection, which is how engines learn that
nobody waits any more.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S = 60.0  # a busy machine takes its time; who is dead is noticed by heartbeats
MAX_HEADER_BYTES = 1 << 18  # the longest head of a response, or line of a stream's framing

_T = TypeVar("_T")
Origin = tuple[str, str, int]  # scheme, host, port


class PooledResponse:
    """A response whose head has been read."""

    def __init__(self, connection: "_Connection", head: bytes, patience_s: float) -> None:
        lines = head.decode("latin-1").split("\r\n")
        version, status, *_ = f"{lines[0]} ".split(" ", 2)
        if not version.startswith("HTTP/1.") or not status.isdecimal():
            raise OSError(f"no HTTP: {lines[0]!r:.80}")
        self.status = int(status)
        pairs = (line.partition(":") for line in lines[1:] if line)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self.whole = False  # all of it was read, so the connection can be used again
        self._connection, self._patience = connection, patience_s

    @property
    def is_reusable(self) -> bool:
        return self.whole and self.headers.get("connection", "").lower() != "close"

    async def read(self) -> bytes:
        return b"".join([part async for part in self.iter_bytes()])

    async def iter_lines(self) -> AsyncGenerator[bytes, None]:
        """Line by line, as they come."""
        rest = b""
        async for part in self.iter_bytes():
            *whole, rest = (rest + part).split(b"\n")
            for line in whole:
                yield line
        if rest:
            yield rest

    async def iter_bytes(self) -> AsyncGenerator[bytes, None]:
        """As it comes."""
        reader, length = self._connection.reader, self.headers.get("content-length")
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            while size := _number((await self._line()).partition(b";")[0], 16):
                yield (await self._wait(reader.readexactly(size + 2)))[:-2]
            while await self._line():
                pass  # trailers
        elif length is not None:
            if size := _number(length.encode(), 10):
                yield await self._wait(reader.readexactly(size))
        else:
            while part := await self._wait(reader.read(1 << 16)):
                yield part
            return  # its end is the connection's end
        self.whole = True

    async def _line(self) -> bytes:
        return (await self._wait(_until(self._connection.reader, b"\n"))).strip()

    async def _wait(self, reading: Awaitable[_T]) -> _T:
        async with asyncio.timeout(self._patience):
            return await reading


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.used = False

    @property
    def open(self) -> bool:
        return not (self.writer.is_closing() or self.reader.at_eof())

    async def ask(self, data: bytes, patience_s: float) -> bytes:
        """The head of the response."""
        async with asyncio.timeout(patience_s):
            self.writer.write(data)
            await self.writer.drain()
            return await _until(self.reader, b"\r\n\r\n")


class ConnectionPool:
    """Use it as an async context manager, which closes what is idle in the end. Raises OSError
    (TimeoutError among them) or EOFError for whatever goes wrong on the way."""

    def __init__(self, idle: int = 1024) -> None:
        self._most = idle  # kept at each place
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
        patience_s: float,
    ) -> AsyncIterator[PooledResponse]:
        """The response, its body still to be read. No wait in all this is longer than said."""
        place, host, target = _address(url)
        data = _head(f"{method} {target} HTTP/1.1", host, headers, len(body)) + body
        connection, head = await self._asked(place, data, patience_s)
        response = None
        try:
            response = PooledResponse(connection, head, patience_s)
            yield response
        finally:
            kept = self._idle.setdefault(place, [])
            if response is not None and response.is_reusable and len(kept) < self._most:
                kept.append(connection)
            else:
                connection.writer.transport.abort()

    async def _asked(
        self, place: Origin, data: bytes, patience_s: float
    ) -> tuple[_Connection, bytes]:
        while True:
            connection = await self._connection(place, patience_s)
            try:
                head = await connection.ask(data, patience_s)
            except (EOFError, ConnectionError) as error:
                connection.writer.transport.abort()
                # A server may close an idle connection at any time: then nothing of this was read.
                if connection.used and not getattr(error, "partial", b""):
                    continue
                raise
            except BaseException:
                connection.writer.transport.abort()
                raise
            connection.used = True
            return connection, head

    async def _connection(self, place: Origin, patience_s: float) -> _Connection:
        kept = self._idle.get(place, [])
        while kept:
            connection = kept.pop()
            if connection.open:
                return connection
        scheme, host, port = place
        if scheme == "https" and self._tls is None:
            self._tls = ssl.create_default_context()
        tls = self._tls if scheme == "https" else None
        limit = min(CONNECT_TIMEOUT_S, patience_s)
        try:
            async with asyncio.timeout(limit):
                opened = await asyncio.open_connection(host, port, ssl=tls, limit=MAX_HEADER_BYTES)
        except TimeoutError:
            raise ConnectionError(f"no connection within {limit:g} s") from None
        return _Connection(*opened)


async def _until(reader: asyncio.StreamReader, end: bytes) -> bytes:
    try:
        return await reader.readuntil(end)
    except asyncio.LimitOverrunError:
        raise OSError(f"no HTTP: no {end!r} within {MAX_HEADER_BYTES} bytes") from None


def _number(text: bytes, base: int) -> int:
    try:
        return int(text, base)
    except ValueError:
        raise OSError(f"no HTTP: {text!r:.80} is no length") from None


@lru_cache(maxsize=1024)
def _address(url: str) -> tuple[Origin, str, str]:
    """Where it leads; the host and the target that a request names."""
    where = urlsplit(url)
    if where.scheme not in ("http", "https") or not where.hostname:
        raise ValueError(f"{url!r:.200} is no http address")
    port = where.port or (443 if where.scheme == "https" else 80)
    path = where.path or "/"
    target = f"{path}?{where.query}" if where.query else path
    return (where.scheme, where.hostname, port), where.netloc.rpartition("@")[2], target


def _head(line: str, host: str, headers: Mapping[str, str], length: int) -> bytes:
    lines = [line, f"Host: {host}", f"Content-Length: {length}"]
    for name, value in headers.items():
        if "\r" in value or "\n" in value:
            raise ValueError(f"header {name}: {value!r:.80} has a line break")
        lines.append(f"{name}: {value}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")
