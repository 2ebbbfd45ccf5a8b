"""Sessions that agents talk to: each with its rules, all in one place.

An agent says what it likes about sampling; what a trainer must be able to reproduce (temperature
and what else shapes the distribution) is ruled by the session. A turn is recorded when its client
has received it, and not before.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from secrets import token_urlsafe
from typing import Any
from uuid import uuid4

from pydantic import NonNegativeFloat, PositiveInt

from paddock.api import ChatRequest, OutputDeltaLike, RequestOutputLike, fit_to_context
from paddock.api import formatter as api_formatter
from paddock.config import BaseSettings
from paddock.records import ApiError, Message, SamplingParams
from paddock.rollout.client import InferenceClient, InferenceRequest, final_delta, turn_seed
from paddock.rollout.prefix_matcher import LOOSE, Digest, PrefixMatcher, prefix_digests
from paddock.rollout.session import PRESERVED, Session, SessionHistory, TurnPrompt
from paddock.text import Renderer, ThinkingKwargs
from paddock.text import messages as text_messages

TOKENIZE_IN_THREAD_CHARS = 1 << 14  # characters whose tokens are worth a thread of their own
_ID = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:@+-")


class GatewaySettings(BaseSettings):
    served_model_name: str = "paddock"
    context_length: PositiveInt | None = (
        None  # tokens of a prompt and its reply; None: the engine says
    )
    max_sessions: PositiveInt = 65536
    max_body_bytes: PositiveInt = 64 << 20
    max_concurrent_turns: PositiveInt = 64  # of one session; more are refused
    delivery_timeout_s: NonNegativeFloat = (
        2.0  # how long a turn waits for the one before to be received
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """How a session samples and compares, whatever its client says."""

    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    thinking: ThinkingKwargs = PRESERVED  # where the client says nothing
    matcher: PrefixMatcher = LOOSE

    def apply(self, asked: SamplingParams, turn: int) -> SamplingParams:
        """What shapes the distribution is the session's; how long a reply may be, where it ends and
        which language it must belong to are the client's, within the session's bounds."""
        own = self.sampling_params
        bounds = [n for n in (own.max_new_tokens, asked.max_new_tokens) if n is not None]
        most = min(bounds, default=None)
        return replace(
            own,
            max_new_tokens=most,
            min_new_tokens=min(own.min_new_tokens, most or own.min_new_tokens),
            stop_token_ids=tuple(dict.fromkeys((*own.stop_token_ids, *asked.stop_token_ids))),
            stop=tuple(dict.fromkeys((*own.stop, *asked.stop))),
            seed=turn_seed(own.seed, turn),
            thinking_budget=asked.thinking_budget
            if own.thinking_budget is None
            else own.thinking_budget,
            grammar=own.grammar or asked.grammar,
        )


@dataclass(frozen=True, slots=True, eq=False)
class ClientConversation:
    """A conversation as a client sent it."""

    messages: Sequence[Message]
    digest: Digest | None = None  # of its JSON
    history: SessionHistory | None = None  # what it begins with


class LiveSession:
    """One session and what is under way in it.

    `api_key` is the secret that its agent sends. It is new whenever a session is opened, also under
    an id that was open before, and is written down nowhere: ids may be guessed, keys may not."""

    def __init__(self, session: Session, rules: SessionConfig) -> None:
        self.session, self.rules = session, rules
        self.api_key = token_urlsafe(32)
        self.turns_started = 0  # turns begun
        self.running = 0
        self._heard: tuple[Digest, SessionHistory] | None = None  # what the newest turn came with
        self._telling: set[asyncio.Event] = set()  # answers being handed over

    def parse_messages(self, raw: Sequence[Any]) -> ClientConversation:
        """The messages that a body spells. Agents send again what they sent with the turn before:
        if they do to the letter, only what follows is read. Raises MessageError."""
        heard, past = self._heard or (None, None)
        length = past.length if past is not None else 0
        now = prefix_digests(raw, length)
        follows = raw[length] if length < len(raw) else None
        replied = isinstance(follows, dict) and follows.get("role") == "assistant"
        if now is None or now[0] != heard or not replied:
            length, past = 0, None
        return ClientConversation(
            text_messages.LazyMessages(raw, known=length), now and now[1], past
        )

    def remember_messages(self, sent: ClientConversation, past: SessionHistory) -> None:
        """What was sent, for the next turn to be held against."""
        self._heard = None if sent.digest is None else (sent.digest, past)

    def begin_delivery(self) -> asyncio.Event:
        """To be set when an answer that is complete was received, or was not."""
        event = asyncio.Event()
        self._telling.add(event)
        return event

    def end_delivery(self, event: asyncio.Event) -> None:
        self._telling.discard(event)
        event.set()

    async def wait_delivered(self, patience_s: float) -> None:
        """Until answers that are being handed over are recorded. A client that has the last byte
        of one may ask again before the server knows that it has."""
        for event in tuple(self._telling):
            try:
                async with asyncio.timeout(patience_s):
                    await event.wait()
            except TimeoutError:
                self._telling.discard(event)


class SessionManager:
    """Every session there is, by its id."""

    def __init__(
        self, generate: InferenceClient, renderer: Renderer, settings: GatewaySettings | None = None
    ) -> None:
        self.generate, self.renderer = generate, renderer
        self.settings = settings or GatewaySettings()
        self._live: dict[str, LiveSession] = {}

    def open(self, id: str | None = None, rules: SessionConfig | None = None) -> LiveSession:
        name = uuid4().hex if id is None else id
        if not name or len(name) > 200 or not _ID.issuperset(name):
            raise ApiError("id: up to 200 letters, digits and . _ : @ + -", param="id")
        if name in self._live:
            raise ApiError(f"session {name!r} is open already", status=409, param="id")
        if len(self._live) >= self.settings.max_sessions:
            raise ApiError(f"{len(self._live)} sessions are open, no more are taken", status=429)
        chosen = rules or SessionConfig()
        live = LiveSession(Session(name, self.renderer, chosen.matcher), chosen)
        self._live[name] = live
        return live

    def close(self, live: LiveSession) -> bool:
        """End a session; it can be asked no more. False if it was closed before."""
        if self._live.get(live.session.id) is not live:
            return False
        del self._live[live.session.id]
        self.generate.end_session(live.session.id)
        return True

    def get(self, id: str) -> LiveSession | None:
        return self._live.get(id)

    def __getitem__(self, id: str) -> LiveSession:
        live = self.get(id)
        if live is None:
            raise ApiError(f"there is no session {id!r:.80}", status=404)
        return live

    def __iter__(self) -> Iterator[LiveSession]:
        return iter(self._live.values())

    def __len__(self) -> int:
        return len(self._live)


@dataclass(slots=True, eq=False)
class TurnInProgress:
    """One turn, from its client's question to the answer that the client has received."""

    sessions: SessionManager
    session: LiveSession
    prompt: TurnPrompt
    request: InferenceRequest
    formatter: api_formatter.ResponseFormatter | None = None  # once somebody is there to tell it
    output: RequestOutputLike | None = None
    _telling: asyncio.Event | None = None

    async def respond(self) -> api_formatter.Payload:
        """The answer in the words of the voice."""
        assert self.formatter is not None
        self.session.running += 1
        try:
            self.output = await self.sessions.generate.generate(self.request)
        finally:
            self.session.running -= 1
        return self.formatter.format_response(final_delta(self.output))

    async def stream(self) -> AsyncGenerator[api_formatter.Payload, None]:
        """The same as it comes. Recorded when the last payload was taken; leaving before that ends
        the engine's work."""
        assert self.formatter is not None
        self.session.running += 1
        try:
            async with aclosing(
                api_formatter.stream_payloads(self.formatter, self._heard())
            ) as every:
                async for payload in every:
                    yield payload
            self._record(self.formatter.parser.streamed_message)
        finally:
            self.session.running -= 1
            if self._telling is not None:
                self.session.end_delivery(self._telling)

    def commit(self) -> None:
        """The client has it: it is part of the session."""
        assert self.formatter is not None
        self._record(self.formatter.parser.message)

    def _record(self, heard: Message) -> None:
        assert self.output is not None
        self.session.session.record(self.prompt, self.output.completion, heard)

    async def _heard(self) -> AsyncGenerator[OutputDeltaLike, None]:
        async with aclosing(self.sessions.generate.stream(self.request)) as deltas:
            async for delta in deltas:
                self.output = delta.output
                if delta.output is not None:
                    self._telling = self.session.begin_delivery()
                yield delta


async def begin_turn(
    sessions: SessionManager, live: LiveSession, talk: ChatRequest, sent: ClientConversation
) -> TurnInProgress:
    """The next turn of a session, ready to be asked for."""
    _refuse(talk)
    await live.wait_delivered(sessions.settings.delivery_timeout_s)
    opening = await _opened(live, talk, sent)
    most = sessions.settings.max_concurrent_turns
    if live.running >= most:  # one agent must not fill the engines' queues
        raise ApiError(f"{most} turns of this session are running, no more are taken", status=429)
    number, live.turns_started = live.turns_started, live.turns_started + 1
    sampling, room = live.rules.apply(talk.sampling, number), sessions.settings.context_length
    if talk.must_call:  # a format is for words, not for the call that the prompt opens
        sampling = replace(sampling, grammar=None)
    if room is not None:
        asked = replace(talk, sampling=sampling, fits_context=True)
        sampling = fit_to_context(asked, len(opening.prompt), room)
    ask = InferenceRequest(
        token_ids=opening.prompt,
        sampling_params=sampling,
        session_id=live.session.id,
        id=f"{live.session.id}/{number}",
    )
    return TurnInProgress(sessions, live, opening, ask)


async def _opened(live: LiveSession, talk: ChatRequest, sent: ClientConversation) -> TurnPrompt:
    session = live.session
    found = session.match_prefix(
        sent.messages, tools=talk.tools, thinking=talk.thinking_for_reply, past=sent.history
    )
    live.remember_messages(sent, found.history)
    forced = talk.tool_call_prefix(session.renderer.tokenizer)
    if found.num_chars > TOKENIZE_IN_THREAD_CHARS:
        return await asyncio.to_thread(session.build_prompt, found, forced)
    return session.build_prompt(found, forced)


def _refuse(talk: ChatRequest) -> None:
    """What a session, whose tokens are its own, cannot do."""
    wrong: Sequence[tuple[bool, str, str]] = (
        (talk.prompt_ids is not None, "input_ids", "a session keeps its own tokens"),
        (talk.continues, "continue_final_message", "a session's replies are sampled whole"),
        (talk.n != 1, "n", "a session gives one reply at a time; ask again for another"),
        (bool(talk.top_logprobs), "top_logprobs", "a session knows the sampled tokens' alone"),
    )
    for is_wrong, param, why in wrong:
        if is_wrong:
            raise ApiError(f"{param}: {why}", param=param)
