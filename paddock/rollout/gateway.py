"""HTTP gateway: token-in-token-out sessions for agents that only exchange text.

An agent uses the OpenAI Chat Completions, OpenAI Responses or Anthropic Messages API, streaming or
not; the same conversation yields the same tokens in every API. Its base URL is the gateway's (with
`/v1` for OpenAI clients), where its key says which session it means, or `/sessions/ID`.

Access: opening a session returns the `api_key` that its agent sends with every request
(`Authorization: Bearer` or `x-api-key`), and a `verdict_key`. With the first the agent can take
turns in its own session and read its state, with the second a grader can post its verdict, nothing
else. Sessions are opened, listed, exported and closed with the admin key, which agents must not
have; without one, only the process of the gateway can do so.
"""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from paddock import __version__
from paddock.api import (
    ChatRequest,
    ThinkingOptions,
    TokenDecoder,
    anthropic_request,
    formatter,
    openai_chat_request,
    openai_responses_request,
    parse_body,
    protocol_for_path,
)
from paddock.http import (
    JsonRouter,
    PayloadStream,
    TrackedJSONResponse,
    error_response,
)
from paddock.http import to_api_error as http_to_api_error
from paddock.records import ApiError, json_codec
from paddock.rollout.agent_routes import AgentRoutes
from paddock.rollout.atif import to_atif
from paddock.rollout.client import EngineUnavailableError, RequestRejectedError
from paddock.rollout.gateway_access import AGENT_BASES, SESSION_PATH, GatewayAccess
from paddock.rollout.gateway_requests import (
    ExportBody,
    SessionBody,
    VerdictBody,
    parse_outcome,
    session_config,
)
from paddock.rollout.rollout_queue import RolloutQueue
from paddock.rollout.session_manager import (
    ClientConversation,
    GatewaySettings,
    LiveSession,
    SessionConfig,
    SessionManager,
    TurnInProgress,
    begin_turn,
)
from paddock.text import ChatTemplateError
from paddock.text import messages as text_messages

__all__ = [
    "GatewayAccess",
    "GatewaySettings",
    "LiveSession",
    "RolloutQueue",
    "SessionConfig",
    "SessionManager",
    "build_gateway",
]

_RequestT = TypeVar("_RequestT", bound=ChatRequest)
_IDLE_CHECK_S = 1.0
_GC_THRESHOLD = 50_000  # objects, of some hundred turns


def build_gateway(
    sessions: SessionManager,
    rules: SessionConfig | None = None,
    *,
    admin_key: str | None = None,
    worker_key: str | None = None,
    queues: Mapping[str, RolloutQueue] | None = None,
) -> FastAPI:
    """The application. `rules` is the default configuration of sessions; without `admin_key`,
    sessions can be opened and closed by this process only, not over HTTP. In a run, `queues` are
    those of the tasks whose rollouts workers take with `worker_key`."""
    if admin_key == "":
        raise ValueError("admin_key must not be empty")
    app = FastAPI(
        title="Paddock sessions",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
    )
    app.router.route_class = _PlainRoute
    app.state.sessions = sessions
    app.state.access = access = GatewayAccess(sessions, admin_key, worker_key)
    gateway = _Gateway(sessions, rules or SessionConfig(), access)
    public = JsonRouter(app, protocol_for_path, sessions.settings.max_body_bytes, to_api_error)
    public.add_route("/health", gateway.health, methods=("GET",))
    admin = replace(public, admit=access.admin)
    admin.add_route("/sessions", gateway.create, body=SessionBody)
    admin.add_route("/sessions", gateway.list_sessions, methods=("GET",))
    admin.add_route(SESSION_PATH, gateway.close, methods=("DELETE",))
    admin.add_route(f"{SESSION_PATH}/export", gateway.export, body=ExportBody)
    replace(public, admit=access.agent_or_admin).add_route(
        SESSION_PATH, gateway.describe, methods=("GET",)
    )
    grader = replace(public, admit=access.grader)
    grader.add_route(f"{SESSION_PATH}/verdict", gateway.score, body=VerdictBody)
    agent = replace(public, admit=access.agent)
    for at, body, handler in (
        ("chat/completions", openai_chat_request.ChatCompletionBody, gateway.chat),
        ("responses", openai_responses_request.ResponsesBody, gateway.respond),
        ("messages", anthropic_request.MessagesBody, gateway.messages),
        ("messages/count_tokens", anthropic_request.CountTokensBody, gateway.count),
    ):
        for base in AGENT_BASES:
            agent.add_route(f"{base}/v1/{at}", handler, body=body)
    for base in AGENT_BASES:
        agent.add_route(f"{base}/v1/models", gateway.models, methods=("GET",))
    if queues is not None:
        AgentRoutes(access, queues).add_to(app)
    app.add_exception_handler(HTTPException, _http_error)
    return app


class _PlainRoute(APIRoute):
    """A route that passes the request to its endpoint as it is: JsonRouter handles the bodies."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.endpoint


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    closing = asyncio.ensure_future(_close_idle(app.state.sessions))
    try:
        with _tuned_gc():
            yield
    finally:
        closing.cancel()


async def _close_idle(sessions: SessionManager) -> None:
    while True:
        sessions.close_idle()
        await asyncio.sleep(_IDLE_CHECK_S)


@contextmanager
def _tuned_gc() -> Iterator[None]:
    """While the gateway runs, garbage collection skips the objects loaded at startup: scanning them
    again and again blocked every turn for 50 ms at a time."""
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(_GC_THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


class _Gateway:
    def __init__(
        self, sessions: SessionManager, rules: SessionConfig, access: GatewayAccess
    ) -> None:
        self.sessions, self.rules, self.access = sessions, rules, access
        decoder = TokenDecoder(sessions.renderer.tokenizer)
        # A client sends back what it received, so it must not receive incomplete tool calls.
        self.context = formatter.FormatterContext(
            decoder, sessions.settings.served_model_name, whole_calls=True
        )

    # --- sessions ---------------------------------------------------------------------------------

    async def health(self, _http: Request, _value: Any) -> Any:
        if why := self.sessions.generate.unavailable_reason():
            raise EngineUnavailableError(why)
        return {"status": "ok"}

    async def create(self, _http: Request, value: Any) -> Any:
        body = parse_body(SessionBody, value)
        live = self.sessions.open(body.id, session_config(body, self.rules))
        id = live.session.id
        keys = {"api_key": live.api_key, "verdict_key": live.verdict_key}
        return {"id": id, "path": f"/sessions/{id}", **keys}

    async def list_sessions(self, _http: Request, _value: Any) -> Any:
        return {"sessions": [_summary(live) for live in self.sessions]}

    async def describe(self, http: Request, _value: Any) -> Any:
        return _summary(await self._settled(http))

    async def close(self, http: Request, _value: Any) -> Any:
        live = await self._settled(http)
        summary = _summary(live)
        self.sessions.close(live)
        return summary

    async def score(self, http: Request, value: Any) -> Any:
        parse_body(VerdictBody, value)
        live = await self._settled(http)
        live.score(parse_outcome(value))
        return _summary(live)

    async def export(self, http: Request, value: Any) -> Any:
        body, live = parse_body(ExportBody, value), await self._settled(http)
        session = live.session
        if body.format == "atif":
            branches = list(session.tree.leaves())
            found = [to_atif(session, i, tokens=bool(body.tokens)) for i in range(len(branches))]
            return {"format": "atif", "trajectories": found}
        if body.format not in (None, "trajectories"):
            raise ApiError("format must be 'trajectories' or 'atif'", param="format")
        every = session.trajectories(
            task_id=body.task_id or session.id,
            group_id=body.group_id or session.id,
            outcome=live.outcome if body.outcome is None else parse_outcome(body.outcome),
        )
        return {
            "format": "trajectories",
            "trajectories": [json_codec.encode(each) for each in every],
        }

    async def _settled(self, http: Request) -> LiveSession:
        """The session of the path, after delivered turns were recorded."""
        live = self.sessions[http.path_params["session"]]
        await live.wait_delivered(self.sessions.settings.delivery_timeout_s)
        return live

    # --- turns ------------------------------------------------------------------------------------

    async def models(self, http: Request, _value: Any) -> Any:
        self.access.session_of(http)
        name = self.sessions.settings.served_model_name
        return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "paddock"}]}

    # Plain functions: a coroutine would keep the conversation in memory while a turn waits.
    def chat(self, http: Request, value: Any) -> Awaitable[Any]:
        live = self.access.session_of(http)
        sent, value = _sent(live, value)
        request = openai_chat_request.parse_chat_request(
            parse_body(openai_chat_request.ChatCompletionBody, value),
            live.rules.sampling_params,
            ThinkingOptions(thinking=live.rules.thinking),
        )
        request = _with_session_stops(live, request)
        sent = sent or ClientConversation(request.messages)
        envelope = self.context.new_chat_envelope(request, 0)
        return self._turn(
            live,
            request,
            sent,
            lambda p: formatter.SingleChoiceFormatter(self.context, request, p, envelope),
        )

    def respond(self, http: Request, value: Any) -> Awaitable[Any]:
        live = self.access.session_of(http)
        thinking = ThinkingOptions(thinking=live.rules.thinking)
        request = openai_responses_request.parse_responses_request(
            parse_body(openai_responses_request.ResponsesBody, value),
            live.rules.sampling_params,
            thinking,
        )
        sent = ClientConversation(request.messages)
        request = replace(_with_session_stops(live, request), messages=())
        return self._turn(
            live, request, sent, lambda p: formatter.ResponsesFormatter(self.context, request, p)
        )

    def messages(self, http: Request, value: Any) -> Awaitable[Any]:
        live = self.access.session_of(http)
        thinking = ThinkingOptions(thinking=live.rules.thinking)
        request = anthropic_request.parse_messages_request(
            parse_body(anthropic_request.MessagesBody, value), live.rules.sampling_params, thinking
        )
        sent = ClientConversation(request.messages)
        request = replace(_with_session_stops(live, request), messages=())
        return self._turn(
            live, request, sent, lambda p: formatter.MessagesFormatter(self.context, request, p)
        )

    async def count(self, http: Request, value: Any) -> Any:
        live = self.access.session_of(http)
        request = anthropic_request.parse_count_tokens_request(
            parse_body(anthropic_request.CountTokensBody, value),
            ThinkingOptions(thinking=live.rules.thinking),
        )
        opening = live.session.begin_turn(
            live.context.visible(request.messages),
            tools=request.tools,
            thinking=request.thinking_for_reply,
        )
        return {"input_tokens": len(opening.prompt)}

    async def _turn(
        self,
        live: LiveSession,
        request: ChatRequest,
        sent: ClientConversation,
        make_formatter: Callable[[Any], formatter.ResponseFormatter],
    ) -> Any:
        with live.remember_error():
            turn: TurnInProgress = await begin_turn(self.sessions, live, request, sent)
        del sent
        turn.formatter = make_formatter(turn.prompt.prompt)
        if request.stream:
            return PayloadStream(turn.stream())
        payload = await turn.respond()
        delivery = live.begin_delivery()
        return TrackedJSONResponse(
            payload, received=turn.commit, over=lambda: live.end_delivery(delivery)
        )


def _with_session_stops(live: LiveSession, request: _RequestT) -> _RequestT:
    """The request with the session's stop strings added: a client that received their text would
    send back a reply that differs from the recorded one."""
    own = live.rules.sampling_params.stop
    if not own:  # the usual case
        return request
    stops = dict.fromkeys((*own, *request.sampling.stop))
    return replace(request, sampling=replace(request.sampling, stop=tuple(stops)))


def _sent(live: LiveSession, value: Any) -> tuple[ClientConversation | None, Any]:
    """The conversation of a chat body, and the body with only its last message."""
    raw = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(raw, list):
        return None, value
    try:
        return live.parse_messages(raw), value | {"messages": raw[-1:]}
    except text_messages.MessageError as error:
        raise ApiError(str(error), param="messages") from None


def to_api_error(error: Exception) -> ApiError:
    """The error that is reported to the client, also for errors of engines."""
    if isinstance(error, RequestRejectedError):
        error = ApiError(str(error))
    if isinstance(error, ChatTemplateError):
        error = ApiError(f"messages: {error}", param="messages")
    if isinstance(error, EngineUnavailableError):
        error = ApiError(f"no engine is available: {error}", status=503, code="engine_failed")
    return http_to_api_error(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    what = {404: f"route {path} not found", 405: f"method {request.method} not allowed at {path}"}
    message = what.get(error.status_code, str(error.detail))
    return error_response(
        protocol_for_path(path), ApiError(message[:300], status=error.status_code)
    )


def _summary(live: LiveSession) -> dict[str, Any]:
    tree = live.session.tree
    return {
        "id": live.session.id,
        "turns": len(tree.nodes),
        "branches": sum(1 for _ in tree.leaves()),
        "tokens": live.session.num_tokens,
        "sampled_tokens": tree.num_sampled_tokens,
        "bytes": tree.nbytes,
        "running": live.running,
        "idle_s": round(live.idle_s, 1),
        "outcome": json_codec.encode(live.outcome),
        "forks": [node.fork_reason for node in tree.nodes if node.fork_reason],
    }
