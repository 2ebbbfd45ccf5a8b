"""HTTP/1.1 connection pool: framings, broken connections, connection reuse."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from paddock.http.pool import ConnectionPool
from tests.patience import PATIENCE_S, until_async

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3\r\nhel\r\n2;ext=1\r\nlo\r\n0\r\nTrailer: x\r\n\r\n"
)
UNTIL_CLOSED = b"HTTP/1.1 200 OK\r\n\r\nhello"
EMPTY = b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n"


class Wire:
    """Requests a server received, and how many connections it had."""

    def __init__(self):
        self.connections, self.requests, self.gone = 0, [], 0
        self.release = asyncio.Event()


@asynccontextmanager
async def server(answer, *, per_connection=10**6, stalls=False):
    """Answers every request alike; closes a connection after `per_connection` requests."""
    wire = Wire()

    async def serve(reader, writer):
        wire.connections += 1
        try:
            for _ in range(per_connection):
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    int(line.split(b":")[1])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length")
                )
                wire.requests.append((head, await reader.readexactly(length)))
                for i, part in enumerate(answer):
                    if stalls and i:
                        await wire.release.wait()
                    writer.write(part)
                    await writer.drain()
                if answer[0] == UNTIL_CLOSED:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            wire.gone += 1
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", wire


async def send(http, url, **more):
    options = {"headers": {}, "timeout_s": PATIENCE_S, **more}
    async with http.request("POST", f"{url}/path?q=1", **options) as response:
        return response.status, await response.read()


def run(work):
    return asyncio.run(work())


@pytest.mark.parametrize(
    ("answer", "body", "connections"),
    [
        ([PLAIN], b"hello", 1),
        ([CHUNKED], b"hello", 1),
        ([EMPTY], b"", 1),
        ([bytes([b]) for b in CHUNKED], b"hello", 1),
        ([UNTIL_CLOSED], b"hello", 3),
        ([PLAIN.replace(b"OK", b"OK\r\nConnection: close")], b"hello", 3),
    ],
)
def test_every_framing_is_read_and_its_connection_reused_where_possible(answer, body, connections):
    async def work():
        async with server(answer) as (url, wire), ConnectionPool() as http:
            for i in range(3):
                status, found = await send(http, url, body=b"x" * i, headers={"A": "b"})
                assert status in (200, 204) and found == body
            assert wire.connections == connections
            assert [options for _, options in wire.requests] == [b"", b"x", b"xx"]
            assert wire.requests[0][0].startswith(b"POST /path?q=1 HTTP/1.1\r\nHost: 127.0.0.1:")
            assert b"\r\nA: b\r\n" in wire.requests[0][0]

    run(work)


def test_a_connection_closed_by_the_server_is_replaced():
    async def work():
        async with server([PLAIN], per_connection=1) as (url, wire), ConnectionPool() as http:
            for _ in range(4):
                assert (await send(http, url))[1] == b"hello"
            assert wire.connections == 4 and len(wire.requests) == 4

    run(work)


def test_leaving_a_response_early_closes_the_connection():
    async def work():
        lines = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\none\n\r\n"
        async with server([lines, b""], stalls=True) as (url, wire), ConnectionPool() as http:
            options = {"headers": {}, "timeout_s": PATIENCE_S}
            async with http.request("GET", url, **options) as response:
                assert await anext(response.iter_lines()) == b"one"
            wire.release.set()
            await until_async(lambda: wire.gone)

    run(work)


def test_lines_are_whole_however_chunks_are_cut():
    async def work():
        text = "data: \u00e9t\u00e9\n\ndata: b\nlast".encode()
        parts = [b"%x\r\n%s\r\n" % (1, bytes([b])) for b in text]
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        async with server([head, *parts, b"0\r\n\r\n"]) as (url, _), ConnectionPool() as http:
            async with http.request("GET", url, headers={}, timeout_s=PATIENCE_S) as response:
                found = [line async for line in response.iter_lines()]
            assert found == text.split(b"\n")

    run(work)


@pytest.mark.parametrize("answer", [[b"", b""], [PLAIN[:-2], b""], [CHUNKED[:60], b""]])
def test_every_wait_has_a_timeout(answer):
    async def work():
        async with server(answer, stalls=True) as (url, wire), ConnectionPool() as http:
            with pytest.raises(TimeoutError):
                await send(http, url, timeout_s=0.05)
            wire.release.set()

    run(work)


@pytest.mark.parametrize(
    "answer",
    [
        *(CHUNKED[:end] for end in range(len(CHUNKED))),
        *(PLAIN[:-2], PLAIN.replace(b"5", b"five"), CHUNKED.replace(b"\r\n3\r\n", b"\r\nx\r\n")),
        b"SMTP ready\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"a" * 2**20,
    ],
)
def test_truncated_or_invalid_http_is_an_error(answer):
    async def work():
        async with server([answer], per_connection=1) as (url, _), ConnectionPool() as http:
            with pytest.raises((OSError, EOFError)):
                await send(http, url)

    run(work)


def test_an_unreachable_or_invalid_address_is_an_error():
    async def work():
        async with ConnectionPool() as http:
            with pytest.raises(OSError, match="9"):
                await send(http, "http://127.0.0.1:9")
            with pytest.raises(ValueError, match="not an HTTP URL"):
                await send(http, "ftp://x")
            with pytest.raises(ValueError, match="line break"):
                await send(http, "http://127.0.0.1:9", headers={"A": "b\r\nC: d"})

    run(work)


def test_hundreds_of_concurrent_requests():
    async def work():
        async with server([PLAIN]) as (url, wire), ConnectionPool(idle=50) as http:
            for _ in range(2):
                found = await asyncio.gather(*(send(http, url) for _ in range(300)))
                assert {body for _, body in found} == {b"hello"}
            assert wire.connections <= 600 - 50, "some were used again"

    run(work)
