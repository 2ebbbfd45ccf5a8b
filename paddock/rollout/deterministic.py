"""Waves: everybody's next request at once, so that what an engine computes together never depends
on who was quick.

A session is in motion from the moment it is let in until it asks for tokens or leaves. When none is
in motion, all asks are handed to the engine together, sorted, while it is held; then everybody who
got an answer is in motion again. A slow world therefore slows everybody: the price of getting the
same bits twice.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from paddock.api import RequestOutputLike
from paddock.rollout.client import InferenceClient, InferenceRequest, NonStreamingClient

PauseEngine = Callable[[], AbstractAsyncContextManager[Any]]


@dataclass(slots=True)
class _Turn:
    call: Callable[[], Awaitable[Any]]
    answer: "asyncio.Future[Any]"
    work: "asyncio.Task[None] | None" = None


class RequestBarrier:
    """`held` keeps the engine from beginning anything until a wave has been handed over whole."""

    def __init__(self, held: PauseEngine = nullcontext) -> None:
        self._held = held
        self._moving: set[str] = set()
        self._turns: dict[str, _Turn] = {}  # asked, not handed over yet
        self._going: asyncio.Task[None] | None = None  # the wave that is being handed over
        self._looking = False
        self.rounds = 0
        self.on_idle: Callable[[], None] = lambda: None  # may let more sessions in

    def join(self, session: str) -> None:
        self._moving.add(session)

    def leave(self, session: str) -> None:
        self._moving.discard(session)
        self._look()

    async def submit(self, session: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """The result of `call`, made together with those of all other sessions."""
        if session in self._turns or session not in self._moving:
            raise RuntimeError(f"session {session} asks out of turn: in lock-step, one at a time")
        turn = _Turn(call, asyncio.get_running_loop().create_future())
        self._turns[session] = turn
        self._moving.discard(session)
        self._look()
        try:
            return await turn.answer
        except asyncio.CancelledError:
            self._turns.pop(session, None)
            if turn.work is not None:
                turn.work.cancel()
            raise

    def _look(self) -> None:
        if not self._moving and not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_soon(self._still)

    def _still(self) -> None:
        """Nobody moves: whoever is waiting outside may come in; if nobody does, a wave goes."""
        self._looking = False
        if self._moving:
            return
        self.on_idle()
        if not self._moving and self._turns:
            turns, self._turns = sorted(self._turns.items()), {}
            self._moving.update(session for session, _ in turns)
            self.rounds += 1
            self._going = asyncio.get_running_loop().create_task(
                self._go([turn for _, turn in turns])
            )

    async def _go(self, turns: list[_Turn]) -> None:
        try:
            async with self._held():
                for turn in turns:
                    turn.work = asyncio.ensure_future(_answered(turn))
                await asyncio.sleep(0)  # each has made its request now
        except Exception as error:  # an engine that cannot be held: whoever asked must hear of it
            for turn in turns:
                if not turn.answer.done():
                    turn.answer.set_exception(error)


async def _answered(turn: _Turn) -> None:
    try:
        result = await turn.call()
    except BaseException as error:
        if not turn.answer.done():
            turn.answer.set_exception(error)
            return
        raise
    if not turn.answer.done():
        turn.answer.set_result(result)


class DeterministicClient(NonStreamingClient):
    """A Generate that answers in waves."""

    def __init__(self, generate: InferenceClient, waves: RequestBarrier) -> None:
        self._generate, self._waves = generate, waves

    async def generate(self, ask: InferenceRequest) -> RequestOutputLike:
        answer: RequestOutputLike = await self._waves.submit(
            ask.session_id, lambda: self._generate.generate(ask)
        )
        return answer

    def end_session(self, session: str) -> None:
        self._generate.end_session(session)

    def unavailable_reason(self) -> str:
        return self._generate.unavailable_reason()
