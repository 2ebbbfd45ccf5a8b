"""HTTP plumbing of servers and clients: routing, streams, timeouts, keys, connection pool.

api_keys.py    API keys in headers, compared in constant time
cross_site.py  detection of cross-site requests and DNS rebinding
json_body.py   JSON values from request bodies
pool.py        HTTP/1.1 client with a connection pool
rendezvous.py  rendezvous hashing of sessions onto ranks
router.py      routes of JSON handlers, with body limits, errors and streams per API
server.py      uvicorn with timeouts for connections that send or read nothing
sockets.py     listening sockets of servers and their URLs
sse.py         server-sent events, and cancellation when a client disconnects
"""

from paddock.http.api_keys import api_key_from_headers, has_api_key
from paddock.http.cross_site import is_allowed_host, is_cross_site
from paddock.http.pool import ConnectionPool, PooledResponse
from paddock.http.rendezvous import ranks_by_preference, rendezvous_order, rendezvous_scores
from paddock.http.router import (
    JsonRouter,
    PayloadStream,
    error_response,
    json_response,
    to_api_error,
)
from paddock.http.server import uvicorn_config
from paddock.http.sockets import bind_socket, socket_url
from paddock.http.sse import TrackedJSONResponse

__all__ = [
    "ConnectionPool",
    "JsonRouter",
    "PayloadStream",
    "PooledResponse",
    "TrackedJSONResponse",
    "api_key_from_headers",
    "bind_socket",
    "error_response",
    "has_api_key",
    "is_allowed_host",
    "is_cross_site",
    "json_response",
    "ranks_by_preference",
    "rendezvous_order",
    "rendezvous_scores",
    "socket_url",
    "to_api_error",
    "uvicorn_config",
]
