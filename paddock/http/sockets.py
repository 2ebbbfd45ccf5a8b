"""Where a server listens."""

import socket


class SocketBindError(ValueError):
    """The address cannot be bound; the message says which and why."""


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket that nobody else has; it does not listen yet."""
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
    """How to reach it from this machine."""
    host, port = sock.getsockname()[:2]
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{here}]:{port}" if ":" in here else f"http://{here}:{port}"
