"""Tokens in, tokens out, for agents that know only text: the HTTP face of sessions.

An agent of any kind is given `/sessions/ID` for its base address (`/sessions/ID/v1` for OpenAI's
clients) and talks OpenAI chat, OpenAI Responses or Anthropic to it, streaming or not. Whatever it
speaks, the same conversation leaves the same tokens.

Who may do what: opening a session returns the `api_key` that its agent sends with every request
(`Authorization: Bearer` or `x-api-key`). With it the agent can take turns in its own session and
look at that; nothing else. Sessions are opened, listed, exported and closed with the admin key,
which agents must not have; a gateway without one leaves that to the process that it runs in.
"""

import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from paddock import __version__
from paddock.api import (
    ChatRequest,
    RequestBody,
    SamplingFields,
    ThinkingOptions,
    TokenDecoder,
    anthropic_request,
    formatter,
    from_template_kwargs,
    openai_chat_request,
    openai_responses_request,
    parse_body,
    parse_sampling_params,
    protocol_for_path,
)
from paddock.http import JsonRouter, PayloadStream, TrackedJSONResponse, error_response, has_api_key
from paddock.http import to_api_error as http_to_api_error
from paddock.records import ApiError, Failure, Outcome, Verdict, json_codec
from paddock.rollout.atif import to_atif
from paddock.rollout.client import EngineUnavailableError, RequestRejectedError
from paddock.rollout.prefix_matcher import MATCHERS
from paddock.rollout.session_manager import (
    ClientConversation,
    LiveSession,
    SessionConfig,
    SessionManager,
    TurnInProgress,
    begin_turn,
)
from paddock.text import ChatTemplateError
from paddock.text import messages as text_messages

SESSION_PATH = "/sessions/{session}"
_Talk = TypeVar("_Talk", bound=ChatRequest)
_LEFT_BEHIND = 50_000  # objects, some hundred turns' worth
NOT_SCORED = Failure(kind="grader", where="export", what="nobody has judged it yet")


class SessionBody(SamplingFields):
    """How a new session samples; see `Rules`."""

    id: str | None = None
    max_tokens: int | None = None
    matcher: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ExportBody(RequestBody):
    task_id: str | None = None
    group_id: str | None = None
    outcome: dict[str, Any] | None = None
    format: str | None = None
    tokens: bool | None = None


def build_gateway(
    sessions: SessionManager, rules: SessionConfig | None = None, *, admin_key: str | None = None
) -> FastAPI:
    """The application. `rules` are those of sessions that are opened without any; without
    `admin_key`, sessions can be opened and closed by this process only, not over HTTP."""
    if admin_key == "":
        raise ValueError("admin_key must not be empty")
    app = FastAPI(
        title="Paddock sessions",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=_undisturbed,
    )
    app.router.route_class = _Straight
    app.state.sessions = sessions
    gateway, access = _Gateway(sessions, rules or SessionConfig()), _Access(sessions, admin_key)
    public = JsonRouter(app, protocol_for_path, sessions.settings.max_body_bytes, to_api_error)
    public.add_route("/health", gateway.health, methods=("GET",))
    admin = replace(public, admit=access.admin)
    admin.add_route("/sessions", gateway.create, body=SessionBody)
    admin.add_route("/sessions", gateway.every, methods=("GET",))
    admin.add_route(SESSION_PATH, gateway.close, methods=("DELETE",))
    admin.add_route(f"{SESSION_PATH}/export", gateway.export, body=ExportBody)
    replace(public, admit=access.either).add_route(SESSION_PATH, gateway.about, methods=("GET",))
    agent = replace(public, admit=access.agent)
    agent.add_route(f"{SESSION_PATH}/v1/models", gateway.models, methods=("GET",))
    agent.add_route(
        f"{SESSION_PATH}/v1/chat/completions",
        gateway.chat,
        body=openai_chat_request.ChatCompletionBody,
    )
    agent.add_route(
        f"{SESSION_PATH}/v1/responses", gateway.respond, body=openai_responses_request.ResponsesBody
    )
    agent.add_route(
        f"{SESSION_PATH}/v1/messages", gateway.messages, body=anthropic_request.MessagesBody
    )
    agent.add_route(
        f"{SESSION_PATH}/v1/messages/count_tokens",
        gateway.count,
        body=anthropic_request.CountTokensBody,
    )
    app.add_exception_handler(HTTPException, _refused)
    return app


class _Straight(APIRoute):
    """A route whose endpoint takes the request as it is: doors read bodies and write answers."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.endpoint


@asynccontextmanager
async def _undisturbed(_app: FastAPI) -> AsyncIterator[None]:
    """While it is served, garbage is looked for among what turns leave behind, not over and over
    among all that was loaded before: that stopped every turn for 50 ms at a time."""
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(_LEFT_BEHIND, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@dataclass(frozen=True, slots=True)
class _Access:
    """Whose key a request must be sent with. Each raises ApiError if it is not."""

    sessions: SessionManager
    admin_key: str | None

    def admin(self, http: Request) -> None:
        if self.admin_key is None:
            what = "closed: this gateway was started without an admin key"
            raise ApiError(f"{http.url.path} is {what}", status=403)
        if not has_api_key(http.headers, self.admin_key):
            raise ApiError("the admin key is missing or wrong", status=401, code="invalid_api_key")

    def agent(self, http: Request) -> None:
        # The same answer for a session that is not there: it says nothing about other sessions.
        session = http.path_params["session"]
        live = self.sessions.get(session)
        if live is None or not has_api_key(http.headers, live.api_key):
            what = "the API key is missing or wrong, or the session is closed"
            raise ApiError(f"session {session!r:.80}: {what}", status=401, code="invalid_api_key")

    def either(self, http: Request) -> None:
        if not has_api_key(http.headers, self.admin_key):
            self.agent(http)


class _Gateway:
    def __init__(self, sessions: SessionManager, rules: SessionConfig) -> None:
        self.sessions, self.rules = sessions, rules
        spelling = TokenDecoder(sessions.renderer.tokenizer)
        # A client sends back what it heard, so it must not hear of calls that come to nothing.
        self.speaker = formatter.FormatterContext(
            spelling, sessions.settings.served_model_name, whole_calls=True
        )

    # --- sessions ---------------------------------------------------------------------------------

    async def health(self, _http: Request, _value: Any) -> Any:
        return {"status": "ok"}

    async def create(self, _http: Request, value: Any) -> Any:
        body = parse_body(SessionBody, value)
        live = self.sessions.open(body.id, self._rules(body))
        id = live.session.id
        return {"id": id, "path": f"/sessions/{id}", "api_key": live.api_key}

    async def every(self, _http: Request, _value: Any) -> Any:
        return {"sessions": [_facts(live) for live in self.sessions]}

    async def about(self, http: Request, _value: Any) -> Any:
        return _facts(await self._settled(http))

    async def close(self, http: Request, _value: Any) -> Any:
        live = await self._settled(http)
        found = _facts(live)
        self.sessions.close(live)
        return found

    async def export(self, http: Request, value: Any) -> Any:
        body, session = parse_body(ExportBody, value), (await self._settled(http)).session
        if body.format == "atif":
            branches = list(session.tree.leaves())
            found = [to_atif(session, i, tokens=bool(body.tokens)) for i in range(len(branches))]
            return {"format": "atif", "trajectories": found}
        if body.format not in (None, "trajectories"):
            raise ApiError("format: neither 'trajectories' nor 'atif'", param="format")
        every = session.trajectories(
            task_id=body.task_id or session.id,
            group_id=body.group_id or session.id,
            outcome=_outcome(body.outcome),
        )
        return {
            "format": "trajectories",
            "trajectories": [json_codec.encode(each) for each in every],
        }

    def _rules(self, body: SessionBody) -> SessionConfig:
        own = self.rules
        matcher = own.matcher if body.matcher is None else MATCHERS.get(body.matcher)
        if matcher is None:
            raise ApiError(f"matcher: none of {', '.join(MATCHERS)}", param="matcher")
        most = own.sampling_params.max_new_tokens if body.max_tokens is None else body.max_tokens
        sampling = parse_sampling_params(
            body,
            max_new_tokens=most,
            defaults=own.sampling_params,
            grammar=own.sampling_params.grammar,
            thinking_budget=own.sampling_params.thinking_budget,
        )
        wish = from_template_kwargs(body.chat_template_kwargs).with_fallback(
            ThinkingOptions(thinking=own.thinking)
        )
        return SessionConfig(sampling_params=sampling, thinking=wish.thinking, matcher=matcher)

    def _live(self, http: Request) -> LiveSession:
        return self.sessions[http.path_params["session"]]

    async def _settled(self, http: Request) -> LiveSession:
        """The session, with every turn that its client has."""
        live = self._live(http)
        await live.wait_delivered(self.sessions.settings.delivery_timeout_s)
        return live

    # --- turns ------------------------------------------------------------------------------------

    async def models(self, http: Request, _value: Any) -> Any:
        self._live(http)
        name = self.sessions.settings.served_model_name
        return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "paddock"}]}

    # Plain functions, of which nothing is left, nor of a conversation, while a turn waits.

    def chat(self, http: Request, value: Any) -> Awaitable[Any]:
        live = self._live(http)
        sent, value = _sent(live, value)
        ask = openai_chat_request.parse_chat_request(
            parse_body(openai_chat_request.ChatCompletionBody, value),
            live.rules.sampling_params,
            ThinkingOptions(thinking=live.rules.thinking),
        )
        ask = _stopping(live, ask)
        sent = sent or ClientConversation(ask.messages)
        frame = self.speaker.new_chat_envelope(ask, 0)
        return self._turn(
            live, ask, sent, lambda p: formatter.SingleChoiceFormatter(self.speaker, ask, p, frame)
        )

    def respond(self, http: Request, value: Any) -> Awaitable[Any]:
        live = self._live(http)
        wish = ThinkingOptions(thinking=live.rules.thinking)
        ask = openai_responses_request.parse_responses_request(
            parse_body(openai_responses_request.ResponsesBody, value),
            live.rules.sampling_params,
            wish,
        )
        sent, ask = ClientConversation(ask.messages), replace(_stopping(live, ask), messages=())
        return self._turn(
            live, ask, sent, lambda p: formatter.ResponsesFormatter(self.speaker, ask, p)
        )

    def messages(self, http: Request, value: Any) -> Awaitable[Any]:
        live = self._live(http)
        wish = ThinkingOptions(thinking=live.rules.thinking)
        ask = anthropic_request.parse_messages_request(
            parse_body(anthropic_request.MessagesBody, value), live.rules.sampling_params, wish
        )
        sent, ask = ClientConversation(ask.messages), replace(_stopping(live, ask), messages=())
        return self._turn(
            live, ask, sent, lambda p: formatter.MessagesFormatter(self.speaker, ask, p)
        )

    async def count(self, http: Request, value: Any) -> Any:
        live = self._live(http)
        ask = anthropic_request.parse_count_tokens_request(
            parse_body(anthropic_request.CountTokensBody, value),
            ThinkingOptions(thinking=live.rules.thinking),
        )
        opening = live.session.begin_turn(
            ask.messages, tools=ask.tools, thinking=ask.thinking_for_reply
        )
        return {"input_tokens": len(opening.prompt)}

    async def _turn(
        self,
        live: LiveSession,
        ask: ChatRequest,
        sent: ClientConversation,
        voice: Callable[[Any], formatter.ResponseFormatter],
    ) -> Any:
        turn: TurnInProgress = await begin_turn(self.sessions, live, ask, sent)
        del sent
        turn.formatter = voice(turn.prompt.prompt)
        if ask.stream:
            return PayloadStream(turn.stream())
        payload = await turn.respond()
        telling = live.begin_delivery()
        return TrackedJSONResponse(
            payload, received=turn.commit, over=lambda: live.end_delivery(telling)
        )


def _stopping(live: LiveSession, ask: _Talk) -> _Talk:
    """What ends a reply by the session's rules is held back from its client, too: a client that
    heard it would send back another reply than the one that was recorded."""
    own = live.rules.sampling_params.stop
    if not own:  # as most: this is asked every turn
        return ask
    stops = dict.fromkeys((*own, *ask.sampling.stop))
    return replace(ask, sampling=replace(ask.sampling, stop=tuple(stops)))


def _sent(live: LiveSession, value: Any) -> tuple[ClientConversation | None, Any]:
    """The conversation of a chat body, and the body with its last message alone."""
    raw = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(raw, list):
        return None, value
    try:
        return live.parse_messages(raw), value | {"messages": raw[-1:]}
    except text_messages.MessageError as error:
        raise ApiError(str(error), param="messages") from None


def to_api_error(error: Exception) -> ApiError:
    """What a client is told of an error, those of engines among them."""
    if isinstance(error, RequestRejectedError):
        error = ApiError(str(error))
    if isinstance(error, ChatTemplateError):
        error = ApiError(f"messages: {error}", param="messages")
    if isinstance(error, EngineUnavailableError):
        error = ApiError(f"no engine could answer: {error}", status=503, code="engine_failed")
    return http_to_api_error(error)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    what = {404: f"there is nothing at {path}", 405: f"{request.method} does not work at {path}"}
    message = what.get(error.status_code, str(error.detail))
    return error_response(
        protocol_for_path(path), ApiError(message[:300], status=error.status_code)
    )


def _facts(live: LiveSession) -> dict[str, Any]:
    tree = live.session.tree
    return {
        "id": live.session.id,
        "turns": len(tree.nodes),
        "branches": sum(1 for _ in tree.leaves()),
        "tokens": live.session.num_tokens,
        "sampled_tokens": tree.num_sampled_tokens,
        "bytes": tree.nbytes,
        "running": live.running,
        "forks": [node.fork_reason for node in tree.nodes if node.fork_reason],
    }


def _outcome(said: dict[str, Any] | None) -> Outcome:
    if said is None:
        return NOT_SCORED
    try:
        return (
            json_codec.decode(Failure, said) if "kind" in said else json_codec.decode(Verdict, said)
        )
    except json_codec.RecordDecodeError as error:
        raise ApiError(f"outcome: {error}", param="outcome") from None
