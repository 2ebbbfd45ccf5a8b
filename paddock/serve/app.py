"""The application: every door, and the guard before them."""

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
    """The HTTP face of engines that hold the same weights.

    Without a renderer, conversations are refused. `weights` change the weights of the engines, one
    each; without them the routes that do so are there, but say that they cannot.
    """
    if not engines:
        raise ConfigError("a server needs at least one engine")
    if weights and len(weights) != len(engines):
        raise ConfigError(f"{len(weights)} ways to change the weights of {len(engines)} engines")
    app = FastAPI(title="Paddock", version=__version__, docs_url=None, redoc_url=None)
    hall = ChatService(engines, tokenizer, renderer, settings)
    app.state.hall = hall
    doors = JsonRouter(app, protocol_for_path, settings.max_body_bytes, engine_error_to_api_error)
    for door in (
        SGLangRoutes(hall),
        VLLMGenerateRoutes(hall),
        OpenAIRoutes(hall),
        ResponsesRoutes(hall),
        AnthropicRoutes(hall),
        TokenizerRoutes(hall),
        InfoRoutes(hall),
        AdminRoutes(hall, weights),
    ):
        door.register(doors)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(Exception, _failed)
    app.add_middleware(AuthMiddleware, keys=keys or ApiKeys(), settings=settings)  # type: ignore[arg-type]
    return app


async def _refused(request: Request, error: Exception) -> Response:
    """What the routing refuses: no such path, no such method."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]  # `url` raises where the Host header is no host
    what = {404: f"there is nothing at {path}", 405: f"{request.method} does not work at {path}"}
    message = what.get(error.status_code, str(error.detail))
    found = error_response(
        protocol_for_path(path), ApiError(message[:300], status=error.status_code)
    )
    found.headers.update(error.headers or {})
    return found


async def _failed(request: Request, error: Exception) -> Response:
    return error_response(
        protocol_for_path(request.scope["path"]), engine_error_to_api_error(error)
    )
