"""Deterministic mode: a barrier that submits the next request of all sessions together.

Engine batches then never depend on timing. A session is active from `join` until it submits a
request or leaves. When no session is active, all requests are submitted to the paused engine
together, sorted by session; sessions with a result are active again. A slow environment therefore
slows down every session: the price of bitwise identical results.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from paddock.records import RequestOutput
from paddock.rollout.client import InferenceClient, InferenceRequest, NonStreamingClient

PauseEngine = Callable[[], AbstractAsyncContextManager[Any]]


@dataclass(slots=True)
class _PendingRequest:
    call: Callable[[], Awaitable[Any]]
    result_future: "asyncio.Future[Any]"
    work: "asyncio.Task[None] | None" = None


class RequestBarrier:
    """`pause_engine` keeps the engine from starting until all requests of a round are submitted."""

    def __init__(self, pause_engine: PauseEngine = nullcontext) -> None:
        self._pause_engine = pause_engine
        self._active: set[str] = set()
        self._pending: dict[str, _PendingRequest] = {}  # not submitted to the engine yet
        self._round: asyncio.Task[None] | None = None  # the round being submitted
        self._scheduled = False
        self.rounds = 0
        self.on_idle: Callable[[], None] = lambda: None  # may add sessions

    def join(self, session: str) -> None:
        self._active.add(session)

    def leave(self, session: str) -> None:
        self._active.discard(session)
        self._schedule_check()

    async def submit(self, session: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """The result of `call`, which is made together with those of all other sessions.

        Raises RuntimeError if the session is not active or already has a request.
        """
        if session in self._pending or session not in self._active:
            raise RuntimeError(
                f"session {session} already has a request: only one at a time in deterministic mode"
            )
        turn = _PendingRequest(call, asyncio.get_running_loop().create_future())
        self._pending[session] = turn
        self._active.discard(session)
        self._schedule_check()
        try:
            return await turn.result_future
        except asyncio.CancelledError:
            self._pending.pop(session, None)
            if turn.work is not None:
                turn.work.cancel()
            raise

    def _schedule_check(self) -> None:
        if not self._active and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._check)

    def _check(self) -> None:
        """No session is active: let `on_idle` add sessions; if it adds none, submit a round."""
        self._scheduled = False
        if self._active:
            return
        self.on_idle()
        if not self._active and self._pending:
            turns, self._pending = sorted(self._pending.items()), {}
            self._active.update(session for session, _ in turns)
            self.rounds += 1
            self._round = asyncio.get_running_loop().create_task(
                self._submit_round([turn for _, turn in turns])
            )

    async def _submit_round(self, turns: list[_PendingRequest]) -> None:
        try:
            async with self._pause_engine():
                for turn in turns:
                    turn.work = asyncio.ensure_future(_run(turn))
                await asyncio.sleep(0)  # every call has submitted its request now
        except Exception as error:  # the engine cannot be paused: every caller gets the error
            for turn in turns:
                if not turn.result_future.done():
                    turn.result_future.set_exception(error)


async def _run(turn: _PendingRequest) -> None:
    try:
        result = await turn.call()
    except BaseException as error:
        if not turn.result_future.done():
            turn.result_future.set_exception(error)
            return
        raise
    if not turn.result_future.done():
        turn.result_future.set_result(result)


class DeterministicClient(NonStreamingClient):
    """InferenceClient that submits its requests through a RequestBarrier."""

    def __init__(self, client: InferenceClient, barrier: RequestBarrier) -> None:
        self._client, self._barrier = client, barrier

    async def generate(self, request: InferenceRequest) -> RequestOutput:
        output: RequestOutput = await self._barrier.submit(
            request.session_id, lambda: self._client.generate(request)
        )
        return output

    def end_session(self, session: str) -> None:
        self._client.end_session(session)

    def unavailable_reason(self) -> str:
        return self._client.unavailable_reason()
