"""Routes of JSON handlers: body limits, cancellation on disconnect, errors and streams per API.

The package does not know any API. `JsonRouter` is given a function that returns the `ApiShape` of
a path: how that API writes errors and ends streams.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from logging import getLogger
from typing import Any, Protocol

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from paddock.http.json_body import parse_json
from paddock.http.sse import (
    DONE,
    ClientDisconnected,
    EventSourceResponse,
    cancel_on_disconnect,
    encode_event,
    prefetch_first,
)
from paddock.records import ApiError, json_codec

log = getLogger("paddock.http")
CLIENT_CLOSED_REQUEST = 499  # nginx's status; the client is gone and does not see it
JSON = "application/json"
BODY_TIMEOUT_S = 60.0  # for a body to arrive, extended while bytes keep coming:
MIN_BODY_BYTES_PER_S = 1000
RETRY_AFTER_S = 1  # told with 429 and 503, after which clients send the request again

Handler = Callable[[Request, Any], Awaitable[Any]]  # the request and the JSON value of its body
PayloadIterator = AsyncIterator[dict[str, Any]]
Authorize = Callable[[Request], None]  # raises ApiError for a client that is not allowed
ErrorMapper = Callable[[Exception], ApiError]  # the error that is reported to the client


class ApiShape(Protocol):
    """How one API writes errors and streams."""

    @property
    def error(self) -> Callable[[ApiError], dict[str, Any]]:
        """The body of an error response."""

    @property
    def event(self) -> Callable[[ApiError], dict[str, Any]]:
        """An error in the middle of a stream."""

    @property
    def named(self) -> bool:
        """Whether events carry their type on an `event:` line."""

    @property
    def done(self) -> bool:
        """Whether a stream ends with `data: [DONE]`."""


async def encode_stream(
    shape: ApiShape, payloads: PayloadIterator, map_error: ErrorMapper
) -> AsyncIterator[bytes]:
    """The payloads as server-sent events. An error after the first event becomes an event."""
    started = False
    try:
        async for payload in payloads:
            yield encode_event(payload, named=shape.named)
            started = True
    except Exception as error:
        if not started:
            raise
        yield encode_event(shape.event(map_error(error)), named=shape.named)
    finally:
        close = getattr(payloads, "aclose", None)
        if close is not None:
            await close()
    if shape.done:
        yield DONE


def to_api_error(error: Exception) -> ApiError:
    """The error that is reported to the client. Unexpected exceptions are logged and become 500."""
    if isinstance(error, ApiError):
        if error.status == 500:
            log.error("%s", error)
        return error
    if isinstance(error, RecursionError):
        return ApiError("the request is nested too deeply")
    log.exception("unexpected error in a request handler", exc_info=error)
    return ApiError(f"internal error: {type(error).__name__}", status=500)


def error_response(shape: ApiShape, error: ApiError) -> Response:
    """The response for `error` in the shape of one API."""
    # After 408 the rest of the body may still arrive; it must not be read as the next request.
    retry = {"Retry-After": str(RETRY_AFTER_S)}
    headers = {
        401: {"WWW-Authenticate": "Bearer"},
        408: {"Connection": "close"},
        429: retry,
        503: retry,
    }.get(error.status)
    return Response(
        json_codec.json_bytes(shape.error(error)),
        status_code=error.status,
        headers=headers,
        media_type=JSON,
    )


def json_response(value: Any, status: int = 200) -> Response:
    return Response(json_codec.json_bytes(value), status_code=status, media_type=JSON)


@dataclass(frozen=True, slots=True)
class PayloadStream:
    """Returned by a handler to stream payloads instead of one JSON value."""

    payloads: PayloadIterator


@dataclass(frozen=True, slots=True)
class JsonRouter:
    """Adds JSON routes to `app`. `shape_of` returns the API shape of a path; `admit` runs before
    the body is read and raises ApiError for clients that are not allowed."""

    app: FastAPI
    shape_of: Callable[[str], ApiShape]
    max_body_bytes: int
    map_error: ErrorMapper = to_api_error
    admit: Authorize | None = None
    body_timeout_s: float = BODY_TIMEOUT_S

    def add_route(
        self,
        path: str,
        handler: Handler,
        *,
        body: type[BaseModel] | None = None,
        methods: tuple[str, ...] = ("POST",),
        media_type: str = JSON,
        max_body_bytes: int | None = None,
    ) -> None:
        """Route `path` to `handler`, which returns a JSON value, a PayloadStream or a Response.

        Exceptions are reported in the shape of the path's API. The handler is cancelled when the
        client disconnects. `body` and `media_type` (of the response) appear in the OpenAPI
        document; `max_body_bytes` overrides the router's limit.
        """
        shape = self.shape_of(path)

        async def endpoint(request: Request) -> Response:
            try:
                if self.admit is not None:
                    self.admit(request)
                # Only the handler references the body, so it can be freed while the handler waits.
                work = handler(
                    request, await self._value(request, max_body_bytes, required=body is not None)
                )
                return await cancel_on_disconnect(request, self._response(shape, work))
            except (ClientDisconnected, ClientDisconnect):
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            except Exception as error:
                return error_response(shape, self.map_error(error))

        for method in methods:
            self.app.add_api_route(
                path,
                endpoint,
                methods=[method],
                operation_id=f"{method.lower()} {path}",
                response_model=None,
                responses=_openapi_responses(shape, media_type, streams="stream" in _fields(body)),
                openapi_extra=_openapi_request(path, body),
            )

    async def _value(self, request: Request, max_bytes: int | None, *, required: bool) -> Any:
        data = await read_body(request, max_bytes or self.max_body_bytes, self.body_timeout_s)
        return parse_json(data) if data or required else None

    async def _response(self, shape: ApiShape, work: Awaitable[Any]) -> Response:
        result = await work
        if isinstance(result, PayloadStream):
            return EventSourceResponse(
                await prefetch_first(encode_stream(shape, result.payloads, self.map_error))
            )
        return result if isinstance(result, Response) else json_response(result)


async def read_body(request: Request, max_bytes: int, timeout_s: float = BODY_TIMEOUT_S) -> bytes:
    """The body of a request.

    Raises ApiError 413 if it exceeds `max_bytes` and 408 if it does not arrive within `timeout_s`
    plus one second per MIN_BODY_BYTES_PER_S bytes received.
    """
    data = bytearray()
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise ApiError(
            f"request body too large: {length:.20} bytes, at most {max_bytes} are allowed",
            status=413,
        )
    start = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            async for chunk in request.stream():
                data += chunk
                if len(data) > max_bytes:
                    raise ApiError(
                        f"request body too large: at most {max_bytes} bytes are allowed", status=413
                    )
                deadline.reschedule(start + timeout_s + len(data) / MIN_BODY_BYTES_PER_S)
    except TimeoutError:
        raise ApiError(
            f"request body timed out after {len(data)} bytes were received", status=408
        ) from None
    return bytes(data)


def _openapi_request(path: str, body: type[BaseModel] | None) -> dict[str, Any]:
    names, text = re.findall(r"{(\w+)}", path), {"type": "string"}
    found: dict[str, Any] = {
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": text} for name in names
        ]
    }
    if body is not None:  # bodies are flat, so their schemas need no definitions
        content = {JSON: {"schema": body.model_json_schema()}}
        found["requestBody"] = {"required": True, "content": content}
    return found


def _fields(body: type[BaseModel] | None) -> Iterable[str]:
    return () if body is None else body.model_fields


def _openapi_responses(
    shape: ApiShape, media_type: str, *, streams: bool
) -> dict[int | str, dict[str, Any]]:
    example = shape.error(ApiError("example"))
    schema = {
        "type": "object",
        "required": list(example),
        "properties": {"error": {"type": "object", "required": list(example["error"])}},
    }
    descriptions = {
        400: "Invalid request.",
        401: "Missing or invalid API key.",
        403: "Forbidden for this client.",
        404: "Not found.",
        408: "Request body timed out.",
        409: "In conflict with what is there.",
        413: "Request body too large.",
        429: "Too many at a time.",
        500: "Internal server error.",
        503: "Server overloaded or engine failed.",
    }
    content = {JSON: {"schema": schema}}
    media_types = [media_type, *(["text/event-stream"] if streams else [])]
    responses: dict[int | str, dict[str, Any]] = {
        status: {"description": text, "content": content} for status, text in descriptions.items()
    }
    responses[200] = {
        "description": "Successful response.",
        "content": {each: {} for each in media_types},
    }
    return responses
