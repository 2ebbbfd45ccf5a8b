"""Listening sockets of servers and their URLs."""

import socket


class SocketBindError(ValueError):
    """The address cannot be bound; the message says which and why."""


def bind_socket(host: str, port: int) -> socket.socket:
    """A bound TCP socket that does not listen yet. Raises SocketBindError if that fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        raise SocketBindError(f"cannot listen on {host}:{port}: {error}") from None
    return sock


def socket_url(sock: socket.socket) -> str:
    """The URL of the socket from this machine."""
    host, port = sock.getsockname()[:2]
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{local}]:{port}" if ":" in local else f"http://{local}:{port}"
