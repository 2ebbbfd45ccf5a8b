"""Session manager: open sessions of agents, their sampling configuration and delivery of turns.

What the trainer must be able to reproduce (temperature and whatever shapes the distribution) is
set by the session, whatever the agent requests. A turn is recorded only once its client has
received it.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from secrets import token_urlsafe
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from paddock.api import ChatRequest, fit_to_context
from paddock.api import formatter as api_formatter
from paddock.config import BaseSettings
from paddock.records import (
    ApiError,
    Failure,
    Message,
    Outcome,
    OutputDelta,
    RequestOutput,
    SamplingParams,
)
from paddock.rollout.client import InferenceClient, InferenceRequest, final_delta, turn_seed
from paddock.rollout.context_management import KEEP_ALL, ContextManager, ContextSettings
from paddock.rollout.prefix_matcher import LOOSE, Digest, PrefixMatcher, prefix_digests
from paddock.rollout.session import PRESERVED, Session, SessionHistory, TurnPrompt
from paddock.text import Renderer, ThinkingKwargs
from paddock.text import messages as text_messages

if TYPE_CHECKING:
    from paddock.rollout.agents import AgentPolicy

NOT_SCORED = Failure(kind="grader", where="verdict", what="not scored yet")
TOKENIZE_IN_THREAD_CHARS = 1 << 14  # longer texts are tokenized in a thread
_ID = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:@+-")


class GatewaySettings(BaseSettings):
    host: str = "127.0.0.1"  # of the gateway of a run, as all up to `admin_key`
    port: NonNegativeInt = 0  # 0: any free one
    url: str | None = None  # as agents reach it; None: by host and port
    admin_key: str | None = None  # None: PADDOCK_ADMIN_KEY, else a new one
    served_model_name: str = "paddock"
    context_length: PositiveInt | None = None  # prompt and reply; None: the engine checks
    max_sessions: PositiveInt = 65536
    max_body_bytes: PositiveInt = 64 << 20
    max_concurrent_turns: PositiveInt = 64  # and tool calls, of one session; more are rejected
    idle_timeout_s: PositiveFloat = 86400.0  # of `paddock gateway`: unused sessions are closed
    delivery_timeout_s: NonNegativeFloat = 2.0  # of waiting for delivery of the turn before


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """Sampling, prefix matching and context management of a session, whatever its client
    requests."""

    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    thinking: ThinkingKwargs = PRESERVED  # default; the client may override it
    matcher: PrefixMatcher = LOOSE
    context_management: ContextSettings = KEEP_ALL
    idle_timeout_s: float | None = None  # None: the gateway's

    def apply(self, requested: SamplingParams, turn: int) -> SamplingParams:
        """The sampling parameters of a turn. The session decides the distribution; the client may
        limit length, add stops and set a grammar."""
        own = self.sampling_params
        bounds = [n for n in (own.max_new_tokens, requested.max_new_tokens) if n is not None]
        limit = min(bounds, default=None)
        return replace(
            own,
            max_new_tokens=limit,
            min_new_tokens=min(own.min_new_tokens, limit or own.min_new_tokens),
            stop_token_ids=tuple(dict.fromkeys((*own.stop_token_ids, *requested.stop_token_ids))),
            stop=tuple(dict.fromkeys((*own.stop, *requested.stop))),
            seed=turn_seed(own.seed, turn),
            thinking_budget=requested.thinking_budget
            if own.thinking_budget is None
            else own.thinking_budget,
            grammar=own.grammar or requested.grammar,
        )


@dataclass(frozen=True, slots=True, eq=False)
class ClientConversation:
    """A conversation as sent by a client."""

    messages: Sequence[Message]
    digest: Digest | None = None  # of its JSON
    history: SessionHistory | None = None  # its known prefix


class LiveSession:
    """An open session with its running turns.

    `api_key` is the secret that its agent sends, `verdict_key` that of whoever scores it. Both are
    new whenever a session is opened, also under a reused id, and are never stored: ids may be
    guessed, keys may not."""

    def __init__(self, session: Session, rules: SessionConfig) -> None:
        self.session, self.rules = session, rules
        self.context = ContextManager(rules.context_management)
        self.api_key, self.verdict_key = token_urlsafe(32), token_urlsafe(32)
        self.outcome: Outcome = NOT_SCORED
        self.scored = asyncio.Event()
        self.agent: AgentPolicy | None = None  # in a run, whose rollout this is
        self.used_at = time.monotonic()  # begin or end of its agent's last request
        self.error: Exception | None = None  # why its last turn failed
        self.turns_started = 0  # including running ones
        self.running = 0  # turns and tool calls
        # The conversation of the newest turn.
        self._last_sent: tuple[Digest, SessionHistory] | None = None
        self._delivering: set[asyncio.Event] = set()  # responses being sent

    def score(self, outcome: Outcome) -> None:
        """Set the outcome, once: repeating it is allowed, changing it is not."""
        if self.outcome not in (NOT_SCORED, outcome):
            raise ApiError(f"session {self.session.id!r} has a verdict already", status=409)
        self.outcome = outcome
        self.scored.set()

    def touch(self) -> None:
        """Its agent is alive."""
        self.used_at = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Time without a request of its agent."""
        return 0.0 if self.running else time.monotonic() - self.used_at

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While a request of its agent is answered."""
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self.touch()

    @contextmanager
    def remember_error(self) -> Iterator[None]:
        """A turn: keep why it failed, to tell later whose fault the end of its agent is."""
        try:
            yield
        except Exception as error:
            self.error = error
            raise
        self.error = None

    def parse_messages(self, raw: Sequence[Any]) -> ClientConversation:
        """The messages of a request body. Agents resend the conversation of the turn before; if its
        JSON is identical, only what follows is parsed. Raises MessageError."""
        digest, past = self._last_sent or (None, None)
        length = past.length if past is not None else 0
        now = prefix_digests(raw, length)
        follows = raw[length] if length < len(raw) else None
        replied = isinstance(follows, dict) and follows.get("role") == "assistant"
        if now is None or now[0] != digest or not replied:
            length, past = 0, None
        return ClientConversation(
            text_messages.LazyMessages(raw, known=length), now and now[1], past
        )

    def remember_messages(self, sent: ClientConversation, past: SessionHistory) -> None:
        """Remember the conversation, to compare the next turn with it."""
        self._last_sent = None if sent.digest is None else (sent.digest, past)

    def begin_delivery(self) -> asyncio.Event:
        """An event to pass to `end_delivery` when the response was received, or was not."""
        event = asyncio.Event()
        self._delivering.add(event)
        return event

    def end_delivery(self, event: asyncio.Event) -> None:
        self._delivering.discard(event)
        event.set()

    async def wait_delivered(self, timeout_s: float) -> None:
        """Wait until responses being sent are recorded: a client may send its next request before
        the server knows that it received the last byte."""
        for event in tuple(self._delivering):
            try:
                async with asyncio.timeout(timeout_s):
                    await event.wait()
            except TimeoutError:
                self._delivering.discard(event)


class SessionManager:
    """All open sessions, by id and by key. `on_close` gets each session that is closed."""

    def __init__(
        self,
        generate: InferenceClient,
        renderer: Renderer,
        settings: GatewaySettings | None = None,
        on_close: Callable[[LiveSession], None] = lambda _: None,
    ) -> None:
        self.generate, self.renderer, self.on_close = generate, renderer, on_close
        self.settings = settings or GatewaySettings()
        self._live: dict[str, LiveSession] = {}
        self._by_key: dict[str, LiveSession] = {}

    def open(self, id: str | None = None, rules: SessionConfig | None = None) -> LiveSession:
        name = uuid4().hex if id is None else id
        if not name or len(name) > 200 or not _ID.issuperset(name):
            raise ApiError("id must be 1 to 200 letters, digits and . _ : @ + -", param="id")
        if name in self._live:
            raise ApiError(f"session {name!r} is already open", status=409, param="id")
        if len(self._live) >= self.settings.max_sessions:
            raise ApiError(f"too many sessions: {len(self._live)} are open", status=429)
        chosen = rules or SessionConfig()
        live = LiveSession(Session(name, self.renderer, chosen.matcher), chosen)
        self._live[name] = self._by_key[live.api_key] = live
        return live

    def close(self, live: LiveSession) -> bool:
        """End a session. False if it was closed before."""
        if self._live.get(live.session.id) is not live:
            return False
        del self._live[live.session.id], self._by_key[live.api_key]
        self.on_close(live)
        self.generate.end_session(live.session.id)
        return True

    def close_idle(self) -> None:
        """Close the sessions that nobody used for their idle time-out."""
        for live in list(self):
            if live.idle_s >= (live.rules.idle_timeout_s or self.settings.idle_timeout_s):
                self.close(live)

    def check_concurrency(self, live: LiveSession) -> None:
        """One agent must not fill the queues of engines and environments."""
        limit = self.settings.max_concurrent_turns
        if live.running >= limit:
            raise ApiError(
                f"{limit} turns of this session are running, which is the maximum", status=429
            )

    def get(self, id: str) -> LiveSession | None:
        return self._live.get(id)

    def with_key(self, api_key: str | None) -> LiveSession | None:
        """The session of an agent's key."""
        return None if api_key is None else self._by_key.get(api_key)

    def __getitem__(self, id: str) -> LiveSession:
        live = self.get(id)
        if live is None:
            raise ApiError(f"session {id!r:.80} not found", status=404)
        return live

    def __iter__(self) -> Iterator[LiveSession]:
        return iter(self._live.values())

    def __len__(self) -> int:
        return len(self._live)


@dataclass(slots=True, eq=False)
class TurnInProgress:
    """One turn, from the client's request to the delivered response."""

    sessions: SessionManager
    session: LiveSession
    prompt: TurnPrompt
    request: InferenceRequest
    formatter: api_formatter.ResponseFormatter | None = None
    output: RequestOutput | None = None
    _delivery: asyncio.Event | None = None

    async def respond(self) -> api_formatter.Payload:
        """The complete response, formatted."""
        assert self.formatter is not None
        with self.session.busy(), self.session.remember_error():
            self.output = await self.sessions.generate.generate(self.request)
        return self.formatter.format_response(final_delta(self.output))

    async def stream(self) -> AsyncGenerator[api_formatter.Payload, None]:
        """The streamed response. Recorded when the last payload was consumed; closing the stream
        earlier aborts the request."""
        assert self.formatter is not None
        try:
            with self.session.busy():
                async with aclosing(
                    api_formatter.stream_payloads(self.formatter, self._deltas())
                ) as every:
                    async for payload in every:
                        yield payload
                self._record(self.formatter.parser.streamed_message)
        finally:
            if self._delivery is not None:
                self.session.end_delivery(self._delivery)

    def commit(self) -> None:
        """Record the turn: the client has received it."""
        assert self.formatter is not None
        self._record(self.formatter.parser.message)

    def _record(self, reply: Message) -> None:
        assert self.output is not None
        stop = self.output.matched_stop
        self.session.session.record(
            self.prompt, self.output.completion, reply, stop=stop if isinstance(stop, str) else ""
        )

    async def _deltas(self) -> AsyncGenerator[OutputDelta, None]:
        generate = self.sessions.generate
        with self.session.remember_error():
            async with aclosing(generate.stream(self.request)) as deltas:
                async for delta in deltas:
                    self.output = delta.output
                    if delta.output is not None:
                        self._delivery = self.session.begin_delivery()
                    yield delta


async def begin_turn(
    sessions: SessionManager, live: LiveSession, chat_request: ChatRequest, sent: ClientConversation
) -> TurnInProgress:
    """Prepare the next turn of a session: prompt and inference request."""
    _reject_unsupported(chat_request)
    await live.wait_delivered(sessions.settings.delivery_timeout_s)
    prompt = await _build_prompt(live, chat_request, sent)
    sessions.check_concurrency(live)
    number, live.turns_started = live.turns_started, live.turns_started + 1
    sampling = live.rules.apply(chat_request.sampling, number)
    if chat_request.must_call and live.rules.sampling_params.grammar is None:
        sampling = replace(sampling, grammar=None)  # of the agent: for text, not for a forced call
    if (context_length := sessions.settings.context_length) is not None:
        limited = replace(chat_request, sampling=sampling, fits_context=True)
        sampling = fit_to_context(limited, len(prompt.prompt), context_length)
    request = InferenceRequest(
        token_ids=prompt.prompt,
        sampling_params=sampling,
        session_id=live.session.id,
        id=f"{live.session.id}/{number}",
    )
    return TurnInProgress(sessions, live, prompt, request)


async def _build_prompt(
    live: LiveSession, chat_request: ChatRequest, sent: ClientConversation
) -> TurnPrompt:
    prompt = await _build_visible_prompt(live, chat_request, sent)
    if live.context.restart(sent.messages, len(prompt.prompt)):
        return await _build_visible_prompt(live, chat_request, sent)
    return prompt


async def _build_visible_prompt(
    live: LiveSession, chat_request: ChatRequest, sent: ClientConversation
) -> TurnPrompt:
    session, messages = live.session, live.context.visible(sent.messages)
    unchanged = messages is sent.messages
    found = session.match_prefix(
        messages,
        tools=chat_request.tools,
        thinking=chat_request.thinking_for_reply,
        past=sent.history if unchanged else None,
    )
    if unchanged:
        live.remember_messages(sent, found.history)
    forced: tuple[int, ...] = ()
    if live.rules.sampling_params.grammar is None:  # else it says what a reply is
        forced = chat_request.tool_call_prefix(session.renderer.tokenizer)
    if found.num_chars > TOKENIZE_IN_THREAD_CHARS:
        return await asyncio.to_thread(session.build_prompt, found, forced)
    return session.build_prompt(found, forced)


def _reject_unsupported(chat_request: ChatRequest) -> None:
    """Reject parameters that sessions do not support, since they own their tokens."""
    wrong: Sequence[tuple[bool, str, str]] = (
        (chat_request.prompt_ids is not None, "input_ids", "a session has its own tokens"),
        (
            chat_request.continues,
            "continue_final_message",
            "not supported: a session samples complete replies",
        ),
        (chat_request.n != 1, "n", "must be 1: a session samples one reply per request"),
        (
            bool(chat_request.top_logprobs),
            "top_logprobs",
            "not supported: a session returns log-probabilities of sampled tokens only",
        ),
    )
    for is_wrong, param, why in wrong:
        if is_wrong:
            raise ApiError(f"{param}: {why}", param=param)
