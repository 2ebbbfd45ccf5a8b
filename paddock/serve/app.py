"""The application: every door, and the guard before them."""

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from paddock import __version__
from paddock.api.dialect import JsonRouter, error_response, protocol_for_path
from paddock.api.errors import ApiError
from paddock.config import ConfigError
from paddock.engine import Engine
from paddock.serve.doors.anthropic import Anthropic
from paddock.serve.doors.control import Control
from paddock.serve.doors.facts import Facts
from paddock.serve.doors.inference import Inference
from paddock.serve.doors.native import Native
from paddock.serve.doors.openai import OpenAI
from paddock.serve.doors.responses import Responses
from paddock.serve.doors.tokens import Tokens
from paddock.serve.guard import Guard
from paddock.serve.hall import Hall, explained
from paddock.serve.settings import Keys, ServeSettings
from paddock.serve.weights import Weights
from paddock.text import Renderer, Tokenizer


def build_app(
    engines: Sequence[Engine],
    tokenizer: Tokenizer,
    renderer: Renderer | None,
    settings: ServeSettings,
    *,
    keys: Keys | None = None,
    weights: Sequence[Weights] = (),
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
    hall = Hall(engines, tokenizer, renderer, settings)
    app.state.hall = hall
    doors = JsonRouter(app, settings.body_bytes, explained)
    for door in (
        Native(hall),
        Inference(hall),
        OpenAI(hall),
        Responses(hall),
        Anthropic(hall),
        Tokens(hall),
        Facts(hall),
        Control(hall, weights),
    ):
        door.open(doors)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(Exception, _failed)
    app.add_middleware(Guard, keys=keys or Keys(), settings=settings)  # type: ignore[arg-type]
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
    return error_response(protocol_for_path(request.scope["path"]), explained(error))
