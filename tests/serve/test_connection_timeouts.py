"""Connections that send nothing, stop in the middle or do not read are closed."""

import socket
import time
from contextlib import contextmanager
from threading import Thread

import pytest
import uvicorn
from fastapi import FastAPI

from paddock.api import protocol_for_path
from paddock.http import JsonRouter
from paddock.http.server import ConnectionTimeouts, uvicorn_config
from tests.patience import PATIENCE_S

BEGUN = b"POST /echo HTTP/1.1\r\nHost: a\r\n"


@contextmanager
def listening(app, timeouts):
    sock = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn_config(app, timeouts, timeout_graceful_shutdown=1))
    thread = Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    yield sock.getsockname()
    server.should_exit = True
    thread.join(PATIENCE_S)
    sock.close()


@pytest.fixture(scope="module")
def address():
    app = FastAPI()

    async def echo(_http, value):
        return {"heard": value, "long": "x" * (value or {}).get("long", 0)}

    router = JsonRouter(app, protocol_for_path, 1 << 20, body_timeout_s=0.2)
    router.add_route("/echo", echo, methods=("POST", "GET"))
    # A busy machine may be slow between connecting and sending.
    limits = ConnectionTimeouts(headers_s=1.0, unread_s=0.2, header_bytes=1 << 14)
    with listening(app, limits) as where:
        yield where


def read_all(sock):
    """Everything the server sends until it closes the connection; raises a timeout otherwise."""
    found = b""
    while piece := sock.recv(1 << 16):
        found += piece
    return found


@pytest.fixture
def client(address):
    with socket.create_connection(address, timeout=PATIENCE_S) as sock:
        yield sock


@pytest.mark.parametrize("sent", [b"", b"GET", BEGUN, BEGUN + b"X-Half: "])
def test_an_incomplete_request_is_closed(client, sent):
    client.sendall(sent)
    assert read_all(client) == b""


def test_an_incomplete_second_request_is_closed(client):
    client.sendall(BEGUN + b"Content-Length: 2\r\n\r\n{}")
    assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
    client.sendall(BEGUN)
    assert b"HTTP" not in read_all(client)


@pytest.mark.parametrize("length", [b"Content-Length: 100", b"Transfer-Encoding: chunked"])
def test_an_incomplete_body_gets_an_error_and_is_closed(client, length):
    client.sendall(BEGUN + length + b"\r\n\r\n")
    found = read_all(client)
    assert found.startswith(b"HTTP/1.1 408") and b"connection: close" in found.lower()


def test_endless_headers_are_rejected():
    with (
        listening(FastAPI(), ConnectionTimeouts(headers_s=600)) as where,
        socket.create_connection(where, timeout=PATIENCE_S) as client,
        pytest.raises(ConnectionError),
    ):
        send_for_long(client, BEGUN + b"X-Long: ")


def send_for_long(client, begun):
    client.sendall(begun)
    for _ in range(5000):
        client.sendall(b"x" * 4096)


def test_a_response_that_is_not_read_is_aborted(address):
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(PATIENCE_S)
        client.connect(address)
        body = b'{"long": 50000000}'
        client.sendall(BEGUN + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        client.recv(1)  # the response has started
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                client.sendall(b"x")  # raises once the connection is closed
            except OSError:
                return
            time.sleep(0.01)
        pytest.fail("the connection is still open")
