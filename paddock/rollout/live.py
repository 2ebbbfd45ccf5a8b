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

from paddock.api.delta_parser import OutputDeltaLike, RequestOutputLike
from paddock.api.errors import ApiError
from paddock.api.formatter import Payload, ResponseFormatter, stream_payloads
from paddock.api.request import ChatRequest, fit_to_context
from paddock.config import BaseSettings
from paddock.records import Message, SamplingParams
from paddock.rollout.client import Ask, Generate, last_delta, turn_seed
from paddock.rollout.match import LOOSE, Digest, Matcher, digests
from paddock.rollout.session import PRESERVED, Opening, Past, Session
from paddock.text import Renderer, ThinkingKwargs
from paddock.text.messages import LazyMessages

LONG = 1 << 14  # characters whose tokens are worth a thread of their own
_ID = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:@+-")


class GatewaySettings(BaseSettings):
    served_name: str = "paddock"
    room: PositiveInt | None = None  # tokens of a prompt and its reply; None: the engine says
    most_sessions: PositiveInt = 65536
    body_bytes: PositiveInt = 64 << 20
    turns_at_once: PositiveInt = 64  # of one session; more are refused
    settle_s: NonNegativeFloat = 2.0  # how long a turn waits for the one before to be received


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How a session samples and compares, whatever its client says."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    thinking: ThinkingKwargs = PRESERVED  # where the client says nothing
    matcher: Matcher = LOOSE

    def ruled(self, asked: SamplingParams, turn: int) -> SamplingParams:
        """What shapes the distribution is the session's; how long a reply may be, where it ends and
        which language it must belong to are the client's, within the session's bounds."""
        own = self.sampling
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
class Sent:
    """A conversation as a client sent it."""

    messages: Sequence[Message]
    digest: Digest | None = None  # of its JSON
    past: Past | None = None  # what it begins with


class Live:
    """One session and what is under way in it.

    `api_key` is the secret that its agent sends. It is new whenever a session is opened, also under
    an id that was open before, and is written down nowhere: ids may be guessed, keys may not."""

    def __init__(self, session: Session, rules: Rules) -> None:
        self.session, self.rules = session, rules
        self.api_key = token_urlsafe(32)
        self.asked = 0  # turns begun
        self.running = 0
        self._heard: tuple[Digest, Past] | None = None  # what the newest turn came with
        self._telling: set[asyncio.Event] = set()  # answers being handed over

    def sent(self, raw: Sequence[Any]) -> Sent:
        """The messages that a body spells. Agents send again what they sent with the turn before:
        if they do to the letter, only what follows is read. Raises MessageError."""
        heard, past = self._heard or (None, None)
        length = past.length if past is not None else 0
        now = digests(raw, length)
        follows = raw[length] if length < len(raw) else None
        replied = isinstance(follows, dict) and follows.get("role") == "assistant"
        if now is None or now[0] != heard or not replied:
            length, past = 0, None
        return Sent(LazyMessages(raw, known=length), now and now[1], past)

    def hear(self, sent: Sent, past: Past) -> None:
        """What was sent, for the next turn to be held against."""
        self._heard = None if sent.digest is None else (sent.digest, past)

    def telling(self) -> asyncio.Event:
        """To be set when an answer that is complete was received, or was not."""
        event = asyncio.Event()
        self._telling.add(event)
        return event

    def settle(self, event: asyncio.Event) -> None:
        self._telling.discard(event)
        event.set()

    async def settled(self, patience_s: float) -> None:
        """Until answers that are being handed over are recorded. A client that has the last byte
        of one may ask again before the server knows that it has."""
        for event in tuple(self._telling):
            try:
                async with asyncio.timeout(patience_s):
                    await event.wait()
            except TimeoutError:
                self._telling.discard(event)


class Sessions:
    """Every session there is, by its id."""

    def __init__(
        self, generate: Generate, renderer: Renderer, settings: GatewaySettings | None = None
    ) -> None:
        self.generate, self.renderer = generate, renderer
        self.settings = settings or GatewaySettings()
        self._live: dict[str, Live] = {}

    def open(self, id: str | None = None, rules: Rules | None = None) -> Live:
        name = uuid4().hex if id is None else id
        if not name or len(name) > 200 or not _ID.issuperset(name):
            raise ApiError("id: up to 200 letters, digits and . _ : @ + -", param="id")
        if name in self._live:
            raise ApiError(f"session {name!r} is open already", status=409, param="id")
        if len(self._live) >= self.settings.most_sessions:
            raise ApiError(f"{len(self._live)} sessions are open, no more are taken", status=429)
        chosen = rules or Rules()
        live = Live(Session(name, self.renderer, chosen.matcher), chosen)
        self._live[name] = live
        return live

    def close(self, live: Live) -> bool:
        """End a session; it can be asked no more. False if it was closed before."""
        if self._live.get(live.session.id) is not live:
            return False
        del self._live[live.session.id]
        self.generate.end(live.session.id)
        return True

    def find(self, id: str) -> Live | None:
        return self._live.get(id)

    def __getitem__(self, id: str) -> Live:
        live = self.find(id)
        if live is None:
            raise ApiError(f"there is no session {id!r:.80}", status=404)
        return live

    def __iter__(self) -> Iterator[Live]:
        return iter(self._live.values())

    def __len__(self) -> int:
        return len(self._live)


@dataclass(slots=True, eq=False)
class TurnUnderway:
    """One turn, from its client's question to the answer that the client has received."""

    sessions: Sessions
    live: Live
    opening: Opening
    ask: Ask
    voice: ResponseFormatter | None = None  # once somebody is there to tell it
    answer: RequestOutputLike | None = None
    _telling: asyncio.Event | None = None

    async def whole(self) -> Payload:
        """The answer in the words of the voice."""
        assert self.voice is not None
        self.live.running += 1
        try:
            self.answer = await self.sessions.generate.respond(self.ask)
        finally:
            self.live.running -= 1
        return self.voice.format_response(last_delta(self.answer))

    async def told(self) -> AsyncGenerator[Payload, None]:
        """The same as it comes. Recorded when the last payload was taken; leaving before that ends
        the engine's work."""
        assert self.voice is not None
        self.live.running += 1
        try:
            async with aclosing(stream_payloads(self.voice, self._heard())) as every:
                async for payload in every:
                    yield payload
            self._record(self.voice.reading.streamed_message)
        finally:
            self.live.running -= 1
            if self._telling is not None:
                self.live.settle(self._telling)

    def received(self) -> None:
        """The client has it: it is part of the session."""
        assert self.voice is not None
        self._record(self.voice.reading.message)

    def _record(self, heard: Message) -> None:
        assert self.answer is not None
        self.live.session.record(self.opening, self.answer.completion, heard)

    async def _heard(self) -> AsyncGenerator[OutputDeltaLike, None]:
        async with aclosing(self.sessions.generate.stream(self.ask)) as deltas:
            async for delta in deltas:
                self.answer = delta.output
                if delta.output is not None:
                    self._telling = self.live.telling()
                yield delta


async def begin(sessions: Sessions, live: Live, talk: ChatRequest, sent: Sent) -> TurnUnderway:
    """The next turn of a session, ready to be asked for."""
    _refuse(talk)
    await live.settled(sessions.settings.settle_s)
    opening = await _opened(live, talk, sent)
    most = sessions.settings.turns_at_once
    if live.running >= most:  # one agent must not fill the engines' queues
        raise ApiError(f"{most} turns of this session are running, no more are taken", status=429)
    number, live.asked = live.asked, live.asked + 1
    sampling, room = live.rules.ruled(talk.sampling, number), sessions.settings.room
    if talk.must_call:  # a format is for words, not for the call that the prompt opens
        sampling = replace(sampling, grammar=None)
    if room is not None:
        asked = replace(talk, sampling=sampling, fits_context=True)
        sampling = fit_to_context(asked, len(opening.prompt), room)
    ask = Ask(
        token_ids=opening.prompt,
        sampling=sampling,
        session=live.session.id,
        id=f"{live.session.id}/{number}",
    )
    return TurnUnderway(sessions, live, opening, ask)


async def _opened(live: Live, talk: ChatRequest, sent: Sent) -> Opening:
    session = live.session
    found = session.found(
        sent.messages, tools=talk.tools, thinking=talk.thinking_for_reply, past=sent.past
    )
    live.hear(sent, found.past)
    forced = talk.tool_call_prefix(session.renderer.tokenizer)
    if found.letters > LONG:
        return await asyncio.to_thread(session.opened, found, forced)
    return session.opened(found, forced)


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
