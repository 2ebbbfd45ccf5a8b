"""Doors: what a handler returns or raises, told in the dialect of its path."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from logging import getLogger
from typing import Any

from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from paddock.api import errors
from paddock.api.body import RequestBody, parse_json
from paddock.api.errors import ApiError
from paddock.http import (
    DONE,
    ClientDisconnected,
    EventSourceResponse,
    cancel_on_disconnect,
    encode_event,
    json_bytes,
    prefetch_first,
)

log = getLogger("paddock.api")
CLIENT_CLOSED_REQUEST = 499  # nobody reads it
JSON = "application/json"
BODY_TIMEOUT_S = 60.0  # for a body to arrive, and more while it does:
MIN_BODY_BYTES_PER_S = 1000

Handler = Callable[[Request, Any], Awaitable[Any]]  # the request and its body's JSON value
PayloadIterator = AsyncIterator[dict[str, Any]]
Authorize = Callable[[Request], None]  # raises ApiError for a client that may not pass
ErrorMapper = Callable[[Exception], ApiError]  # what a client is told of an error


@dataclass(frozen=True, slots=True)
class ApiProtocol:
    """How errors look, and how a stream is written."""

    name: str
    error: Callable[[ApiError], dict[str, Any]]
    event: Callable[[ApiError], dict[str, Any]]  # an error in the middle of a stream
    named: bool = False  # events carry their type on a line of its own
    done: bool = True  # a stream ends in [DONE]

    async def encode_stream(
        self, payloads: PayloadIterator, explain: ErrorMapper
    ) -> AsyncIterator[bytes]:
        """A stream's payloads as events. Once it has begun, an error is one of them."""
        started = False
        try:
            async for payload in payloads:
                yield encode_event(payload, named=self.named)
                started = True
        except Exception as error:
            if not started:
                raise
            yield encode_event(self.event(explain(error)), named=self.named)
        finally:
            close = getattr(payloads, "aclose", None)
            if close is not None:
                await close()
        if self.done:
            yield DONE


SGLANG = ApiProtocol("native", errors.sglang_error, errors.sglang_error)
OPENAI = ApiProtocol("openai", errors.openai_error, errors.openai_error)
RESPONSES = ApiProtocol(
    "responses", errors.openai_error, errors.responses_error_event, named=True, done=False
)
ANTHROPIC = ApiProtocol(
    "anthropic", errors.anthropic_error, errors.anthropic_error, named=True, done=False
)


def protocol_for_path(path: str) -> ApiProtocol:
    """In which words a path answers, even if there is nothing at it.

    >>> protocol_for_path("/v1/messages").sample_id, protocol_for_path("/sessions/7/v1/responses").sample_id
    ('anthropic', 'responses')
    """
    for part, dialect in (
        ("/v1/messages", ANTHROPIC),
        ("/v1/responses", RESPONSES),
        ("/v1/", OPENAI),
    ):
        if path.startswith(part) or (path.startswith("/sessions/") and part in path):
            return dialect
    return SGLANG


def to_api_error(error: Exception) -> ApiError:
    """What a client is told; a bug of ours is also logged."""
    if isinstance(error, ApiError):
        if error.status == 500:
            log.error("%s", error)
        return error
    if isinstance(error, RecursionError):
        return ApiError("the request is nested too deeply")
    log.exception("a request failed through a bug", exc_info=error)
    return ApiError(f"internal error: {type(error).__name__}", status=500)


def error_response(dialect: ApiProtocol, error: ApiError) -> Response:
    # Of a request that did not arrive, the rest may still come: it must not be read as the next.
    headers = {401: {"WWW-Authenticate": "Bearer"}, 408: {"Connection": "close"}}.get(error.status)
    return Response(
        json_bytes(dialect.error(error)),
        status_code=error.status,
        headers=headers,
        media_type=JSON,
    )


def json_response(value: Any, status: int = 200) -> Response:
    return Response(json_bytes(value), status_code=status, media_type=JSON)


@dataclass(frozen=True, slots=True)
class PayloadStream:
    """What a handler returns in place of a value when payloads are to follow one by one."""

    payloads: PayloadIterator


@dataclass(frozen=True, slots=True)
class JsonRouter:
    """Where handlers are put. `admit` is asked before a body is read."""

    app: FastAPI
    body_bytes: int
    explain: ErrorMapper = to_api_error
    admit: Authorize | None = None
    body_s: float = BODY_TIMEOUT_S

    def add_route(
        self,
        path: str,
        handler: Handler,
        *,
        body: type[RequestBody] | None = None,
        methods: tuple[str, ...] = ("POST",),
        media: str = JSON,
        most: int | None = None,
    ) -> None:
        """Put `handler` at `path`. It returns a JSON value, a Stream or a Response; whatever it
        raises is told in the path's dialect. The client is watched meanwhile: leaving cancels it.
        `body` and `media`, the type of the answer, are shown in the OpenAPI document; a body may
        have `most` bytes, or as many as all others."""
        dialect = protocol_for_path(path)

        async def door(request: Request) -> Response:
            try:
                if self.admit is not None:
                    self.admit(request)
                # The handler alone holds the body, so that it can let go of it while it waits.
                work = handler(request, await self._value(request, most, wanted=body is not None))
                return await cancel_on_disconnect(request, self._response(dialect, work))
            except (ClientDisconnected, ClientDisconnect):
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            except Exception as error:
                return error_response(dialect, self.explain(error))

        for method in methods:
            self.app.add_api_route(
                path,
                door,
                methods=[method],
                operation_id=f"{method.lower()} {path}",
                response_model=None,
                responses=_responses(dialect, media, streams="stream" in _fields(body)),
                openapi_extra=_request_body(body) if body is not None else None,
            )

    async def _value(self, request: Request, most: int | None, *, wanted: bool) -> Any:
        data = await read_body(request, most or self.body_bytes, self.body_s)
        return parse_json(data) if data or wanted else None

    async def _response(self, dialect: ApiProtocol, work: Awaitable[Any]) -> Response:
        found = await work
        if isinstance(found, PayloadStream):
            return EventSourceResponse(
                await prefetch_first(dialect.encode_stream(found.payloads, self.explain))
            )
        return found if isinstance(found, Response) else json_response(found)


async def read_body(request: Request, most: int, seconds: float = BODY_TIMEOUT_S) -> bytes:
    """A request's body, if it is not longer than `most` bytes and does not stop arriving."""
    data = bytearray()
    said = request.headers.get("content-length", "")
    if said.isdecimal() and int(said) > most:
        raise ApiError(f"the body has {said:.20} bytes, more than {most}", status=413)
    begun = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(seconds) as deadline:
            async for chunk in request.stream():
                data += chunk
                if len(data) > most:
                    raise ApiError(f"the body has more than {most} bytes", status=413)
                deadline.reschedule(begun + seconds + len(data) / MIN_BODY_BYTES_PER_S)
    except TimeoutError:
        raise ApiError(
            f"the body did not arrive in time: {len(data)} bytes so far", status=408
        ) from None
    return bytes(data)


def _request_body(body: type[RequestBody]) -> dict[str, Any]:
    """For the OpenAPI document. Bodies are flat, so their schemas need no definitions."""
    schema = body.model_json_schema()
    return {"requestBody": {"required": True, "content": {JSON: {"schema": schema}}}}


def _fields(body: type[RequestBody] | None) -> Iterable[str]:
    return () if body is None else body.model_fields


def _responses(
    dialect: ApiProtocol, media: str, *, streams: bool
) -> dict[int | str, dict[str, Any]]:
    """For the OpenAPI document: errors have the dialect's shape."""
    shape = dialect.error(ApiError("example"))
    schema = {
        "type": "object",
        "required": list(shape),
        "properties": {"error": {"type": "object", "required": list(shape["error"])}},
    }
    told = {
        400: "The request cannot be answered.",
        401: "The key is missing or wrong.",
        403: "The route is not open to this client.",
        404: "There is no such thing.",
        408: "The body did not arrive in time.",
        413: "The body is too long.",
        500: "A fault of the server.",
        503: "The server is overloaded or its engine has failed.",
    }
    content = {JSON: {"schema": schema}}
    kinds = [media, *(["text/event-stream"] if streams else [])]
    found: dict[int | str, dict[str, Any]] = {
        status: {"description": why, "content": content} for status, why in told.items()
    }
    found[200] = {"description": "The answer.", "content": {kind: {} for kind in kinds}}
    return found
