"""FastAPI application of the inference server: all routes behind the auth middleware."""

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from paddock import __version__
from paddock.api import protocol_for_path
from paddock.config import ConfigError
from paddock.engine import Engine
from paddock.http import JsonRouter, error_response
from paddock.records import ApiError
from paddock.serve.auth import AuthMiddleware
from paddock.serve.chat_service import ChatService, engine_error_to_api_error
from paddock.serve.routes.admin import AdminRoutes
from paddock.serve.routes.anthropic import AnthropicRoutes
from paddock.serve.routes.info import InfoRoutes
from paddock.serve.routes.openai import OpenAIRoutes
from paddock.serve.routes.responses import ResponsesRoutes
from paddock.serve.routes.sglang import SGLangRoutes
from paddock.serve.routes.tokenize import TokenizerRoutes
from paddock.serve.routes.vllm import VLLMGenerateRoutes
from paddock.serve.settings import ApiKeys, ServeSettings
from paddock.serve.weight_updater import WeightUpdater
from paddock.text import Renderer, Tokenizer


def build_app(
    engines: Sequence[Engine],
    tokenizer: Tokenizer,
    renderer: Renderer | None,
    settings: ServeSettings,
    *,
    keys: ApiKeys | None = None,
    weights: Sequence[WeightUpdater] = (),
) -> FastAPI:
    """The HTTP application for engines that hold the same weights.

    Without a renderer, chat requests are rejected. `weights` are the weight updaters, one per
    engine; without them the weight update routes report an error.
    """
    if not engines:
        raise ConfigError("a server needs at least one engine")
    if weights and len(weights) != len(engines):
        raise ConfigError(
            f"expected one weight updater per engine, got {len(weights)} for {len(engines)} engines"
        )
    app = FastAPI(title="Paddock", version=__version__, docs_url=None, redoc_url=None)
    service = ChatService(engines, tokenizer, renderer, settings)
    app.state.service = service
    router = JsonRouter(app, protocol_for_path, settings.max_body_bytes, engine_error_to_api_error)
    for routes in (
        SGLangRoutes(service),
        VLLMGenerateRoutes(service),
        OpenAIRoutes(service),
        ResponsesRoutes(service),
        AnthropicRoutes(service),
        TokenizerRoutes(service),
        InfoRoutes(service),
        AdminRoutes(service, weights),
    ):
        routes.register(router)
    app.add_exception_handler(HTTPException, _handle_http_error)
    app.add_exception_handler(Exception, _handle_exception)
    app.add_middleware(AuthMiddleware, keys=keys or ApiKeys(), settings=settings)  # type: ignore[arg-type]
    return app


async def _handle_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in the error shape of the path's API."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]  # `request.url` raises if the Host header is invalid
    messages = {
        404: f"route {path} not found",
        405: f"method {request.method} not allowed at {path}",
    }
    message = messages.get(error.status_code, str(error.detail))
    response = error_response(
        protocol_for_path(path), ApiError(message[:300], status=error.status_code)
    )
    response.headers.update(error.headers or {})
    return response


async def _handle_exception(request: Request, error: Exception) -> Response:
    return error_response(
        protocol_for_path(request.scope["path"]), engine_error_to_api_error(error)
    )
