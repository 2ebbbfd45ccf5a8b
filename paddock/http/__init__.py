"""What every HTTP server of ours needs, whatever it serves.

cross_site.py  requests that a browser sends on behalf of other sites' pages
server.py  uvicorn with deadlines for connections that send or read nothing
"""

from paddock.http.api_keys import api_key_from_headers, has_api_key
from paddock.http.cross_site import is_allowed_host, is_cross_site
from paddock.http.pool import ConnectionPool, PooledResponse
from paddock.http.server import uvicorn_config
from paddock.http.sockets import bind_socket, socket_url
from paddock.http.sse import (
    DONE,
    ClientDisconnected,
    EventSourceResponse,
    TrackedJSONResponse,
    cancel_on_disconnect,
    encode_event,
    json_bytes,
    prefetch_first,
)

__all__ = [
    "DONE",
    "ClientDisconnected",
    "ConnectionPool",
    "EventSourceResponse",
    "PooledResponse",
    "TrackedJSONResponse",
    "api_key_from_headers",
    "bind_socket",
    "cancel_on_disconnect",
    "encode_event",
    "has_api_key",
    "is_allowed_host",
    "is_cross_site",
    "json_bytes",
    "prefetch_first",
    "socket_url",
    "uvicorn_config",
]
