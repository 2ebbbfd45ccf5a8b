"""Several replicas as one: asks go where their session's prefix is, and elsewhere if that is gone.

Every replica is listened to: two heartbeats missed, and it is deregistered, in less than two
seconds by default. What it was answering is asked again elsewhere, from the ids that the asker
holds; tokens that had already come stay, and the rest is asked for. No wait is without an end. A
heartbeat that this process itself was too busy to hear in time says nothing about the replica.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing, suppress
from dataclasses import replace
from logging import getLogger
from types import TracebackType
from typing import Self, TypeVar

from pydantic import PositiveFloat, PositiveInt

from paddock.api import OutputDeltaLike, RequestOutputLike
from paddock.config import BaseSettings
from paddock.records import Completion, Segment
from paddock.rollout.client import (
    EngineUnavailableError,
    InferenceClient,
    InferenceRequest,
    OutputDelta,
)
from paddock.rollout.continuation import can_continue, continuation_request, merge_partial_output
from paddock.rollout.session_router import SessionRouter
from paddock.rollout.task_health import RunAbortedError

log = getLogger("paddock.rollout")

_T = TypeVar("_T")
HealthCheck = Callable[[float], Awaitable[bool]]  # within so many seconds
LOOP_LAG_PROBE_S, LOOP_LAG_LIMIT_S = (
    0.02,
    0.1,
)  # how often this process feels its own pulse, and when it is late
FAILURES_BEFORE_REASSIGN = (
    3  # failures of one replica, alive all the while, before a session is moved
)


class ReplicaPoolSettings(BaseSettings):
    health_check_interval_s: PositiveFloat = 0.5  # between heartbeats
    health_check_timeout_s: PositiveFloat = 0.4  # for each of them
    health_failure_threshold: PositiveInt = 2  # in a row, and a replica is dead
    request_timeout_s: PositiveFloat = 900.0  # of an ask, every replica it is tried on included
    max_backoff_s: PositiveFloat = 1.0
    unreachable_timeout_s: PositiveFloat = 600.0  # with no replica alive, before the run ends


class Replica:
    """One engine or server, by a name that stays the same when it comes back."""

    def __init__(self, name: str, generate: InferenceClient, alive: HealthCheck) -> None:
        self.name, self.generate, self.alive = name, generate, alive
        self.missed = 0
        self.pending: set[asyncio.Timeout] = set()  # waits for it, to be ended when it dies


class ReplicaPool:
    """Use it as an async context manager, which listens for heartbeats.

    `admit` is awaited before a replica that came back, or a new one, is asked for anything: it
    brings its weights up to date, and says whether it could.
    """

    def __init__(
        self,
        replicas: Iterable[Replica],
        settings: ReplicaPoolSettings | None = None,
        *,
        router: SessionRouter | None = None,
        admit: Callable[[str], Awaitable[bool]] | None = None,
    ) -> None:
        self.settings = settings or ReplicaPoolSettings()
        self.replicas = {replica.name: replica for replica in replicas}
        self.router = router or SessionRouter()
        for name in self.replicas:
            self.router.join(name)
        self._admit = admit
        self._busy: dict[str, int] = {}  # asks of each session
        self._changed = asyncio.Condition()
        self._listeners: dict[str, asyncio.Task[None]] = {}
        self._chores: list[asyncio.Task[None]] = []
        self._late = float("-inf")  # when this process was last too busy to listen
        self._empty_since: float | None = None  # since when no replica is alive
        self._why_gone: dict[str, str] = {}  # of each replica, the last time it was

    async def __aenter__(self) -> Self:
        for replica in self.replicas.values():
            self._listen_to(replica)
        self._chores = [asyncio.create_task(self._balance()), asyncio.create_task(self._pulse())]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        tasks = [*self._listeners.values(), *self._chores]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- members ----------------------------------------------------------------------------------

    @property
    def live_replicas(self) -> tuple[str, ...]:
        return self.router.ranks

    async def add(self, replica: Replica) -> bool:
        """A new replica, once it was admitted; whether it was. If not it is tried again."""
        self.replicas[replica.name] = replica
        self._listen_to(replica)
        return await self._welcome(replica)

    async def remove(self, name: str) -> None:
        """Ask a replica for nothing any more; what it is answering goes elsewhere."""
        listener = self._listeners.pop(name, None)
        if listener is not None:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)
        replica = self.replicas.pop(name)
        self._bury(replica, "it was removed")

    # --- asking -----------------------------------------------------------------------------------

    async def generate(self, ask: InferenceRequest) -> RequestOutputLike:
        end = asyncio.get_running_loop().time() + self.settings.request_timeout_s
        before: Completion | None = None
        current, failures = ask, 0
        with _Counted(self._busy, ask.session_id):
            while True:
                replica = await self._placed(current, end)
                try:
                    answer = await self._wait(replica, replica.generate.generate(current), end)
                except EngineUnavailableError as error:
                    failures += 1
                    await self._failed(replica, current, error, failures, end)
                    current = _again(current, ask, failures)
                    continue
                whole = merge_partial_output(before, answer, ask)
                rest = self._broken_off(ask, whole.completion)
                if rest is None:
                    self._grew(ask, whole.completion)
                    return whole
                failures += 1
                if rest is not ask:
                    before = whole.completion
                current = _again(rest, ask, failures)
                await self._pause(failures, end)

    async def stream(self, ask: InferenceRequest) -> AsyncGenerator[OutputDeltaLike, None]:
        end = asyncio.get_running_loop().time() + self.settings.request_timeout_s
        current, failures, told = ask, 0, DeltaAccumulator()
        with _Counted(self._busy, ask.session_id):
            while True:
                replica, before = await self._placed(current, end), told.completion()
                failures += 1
                try:
                    async with aclosing(self._deltas(replica, current, end)) as deltas:
                        async for delta in deltas:
                            told.add(delta)
                            answer = delta.output and merge_partial_output(
                                before, delta.output, ask
                            )
                            if answer and self._broken_off(ask, answer.completion):
                                answer = None
                            if answer or delta.token_ids:
                                yield OutputDelta(
                                    token_ids=delta.token_ids,
                                    logprobs=delta.logprobs,
                                    version=delta.version,
                                    top_logprobs=delta.top_logprobs,
                                    output=answer,
                                )
                            if answer:
                                self._grew(ask, answer.completion)
                                return
                    await self._pause(failures, end)
                except EngineUnavailableError as error:
                    await self._failed(replica, current, error, failures, end)
                current = _again(self._after(ask, told.completion()), ask, failures)

    async def _deltas(
        self, replica: Replica, ask: InferenceRequest, end: float
    ) -> AsyncGenerator[OutputDeltaLike, None]:
        """A replica's stream, each wait of which has an end."""
        async with aclosing(replica.generate.stream(ask)) as deltas:
            while True:
                delta = await self._wait(replica, anext(deltas, None), end)
                if delta is None:
                    raise EngineUnavailableError(f"{replica.name}: the stream broke off")
                yield delta
                if delta.output is not None:
                    return

    async def while_alive(self, name: str, work: Awaitable[_T]) -> _T:
        """What `work` gives, which waits for a replica; EngineLost once that is deregistered."""
        is_alive = name in self.router.ranks  # else nobody will say once more that it is gone
        patience_s = (
            self.settings.request_timeout_s if is_alive else self.settings.health_check_timeout_s
        )
        end = asyncio.get_running_loop().time() + patience_s
        return await self._wait(self.replicas[name], work, end)

    def end_session(self, session: str) -> None:
        self.router.end(session)
        for replica in self.replicas.values():
            replica.generate.end_session(session)

    def _broken_off(self, ask: InferenceRequest, done: Completion) -> InferenceRequest | None:
        """What is left to ask for if an engine broke a reply off, as some do for new weights. The
        ask itself if it must begin again."""
        if done.finish != "abort":
            return None
        return continuation_request(ask, done) if can_continue(ask.sampling_params) else ask

    def _after(self, ask: InferenceRequest, told: Completion | None) -> InferenceRequest:
        """What is left to ask for when some of the reply was passed on already."""
        if told is None:
            return ask
        rest = continuation_request(ask, told) if can_continue(ask.sampling_params) else None
        if rest is None:
            raise EngineUnavailableError(
                "the engine was lost in the middle of a reply that cannot be continued"
            )
        return rest

    async def _placed(self, ask: InferenceRequest, end: float) -> Replica:
        """Whose turn it is; waits for a replica if there is none. Raises RunAborted when there has
        been none for so long that none is to be expected."""
        async with self._changed:
            while not self.router.ranks:
                if self._empty_since is None:
                    self._empty_since = asyncio.get_running_loop().time()
                given_up = self._empty_since + self.settings.unreachable_timeout_s
                try:
                    async with asyncio.timeout_at(min(end, given_up)):
                        await self._changed.wait()
                except TimeoutError:
                    if end < given_up:
                        raise EngineUnavailableError(
                            f"no engine is alive: {self.unavailable_reason()}"
                        ) from None
                    seconds = self.settings.unreachable_timeout_s
                    raise RunAbortedError(
                        f"no engine has answered for {seconds:g} s: {self.unavailable_reason()}"
                    ) from None
        return self.replicas[self.router.route(ask.session_id, len(ask.token_ids))]

    def unavailable_reason(self) -> str:
        if self.router.ranks:
            return ""
        return "; ".join(f"{name}: {self._why_gone.get(name, 'gone')}" for name in self.replicas)

    async def _wait(self, replica: Replica, work: Awaitable[_T], end: float) -> _T:
        """What `work` gives, unless the replica dies or the deadline comes first."""
        limit = asyncio.timeout_at(end)
        try:
            async with limit:
                replica.pending.add(limit)
                try:
                    return await work
                finally:
                    replica.pending.discard(limit)
        except TimeoutError:
            raise EngineUnavailableError(f"{replica.name} was lost, or took too long") from None

    async def _failed(
        self, replica: Replica, ask: InferenceRequest, error: Exception, failures: int, end: float
    ) -> None:
        """Find out whether it is dead, and wait a little before the next attempt."""
        log.warning("session %s: %s: %s", ask.session_id, replica.name, error)
        if asyncio.get_running_loop().time() >= end:
            raise EngineUnavailableError(
                f"{failures} attempts within {self.settings.request_timeout_s:g} s: {error}"
            )
        if replica.name in self.router.ranks:
            if await self._answers(replica) is False:
                self._bury(replica, str(error))
            elif failures % FAILURES_BEFORE_REASSIGN == 0:
                self.router.reassign(ask.session_id)
        await self._pause(failures, end)

    async def _pause(self, failures: int, end: float) -> None:
        if failures > 1:
            backoff = min(self.settings.max_backoff_s, 0.02 * 2**failures)
            left = end - asyncio.get_running_loop().time()
            await asyncio.sleep(max(0.0, min(backoff, left)))

    def _grew(self, ask: InferenceRequest, done: Completion) -> None:
        self.router.update_load(ask.session_id, len(ask.token_ids) + len(done.token_ids))

    # --- heartbeats -------------------------------------------------------------------------------

    def _listen_to(self, replica: Replica) -> None:
        self._listeners[replica.name] = asyncio.create_task(self._listen(replica))

    async def _listen(self, replica: Replica) -> None:
        while True:
            await asyncio.sleep(self.settings.health_check_interval_s)
            answers = await self._answers(replica)
            if answers:
                replica.missed = 0
                if replica.name not in self.router.ranks:
                    await self._welcome(replica)
            elif answers is False:
                replica.missed += 1
                if replica.missed >= self.settings.health_failure_threshold:
                    self._bury(replica, f"{replica.missed} heartbeats missed")

    async def _answers(self, replica: Replica) -> bool | None:
        """Whether it is alive; None if nobody here had the time to hear it."""
        loop = asyncio.get_running_loop()
        asked, answers = loop.time(), False
        with suppress(TimeoutError):
            async with asyncio.timeout(self.settings.health_check_timeout_s):
                answers = await replica.alive(self.settings.health_check_timeout_s)
        if not answers:
            await asyncio.sleep(LOOP_LAG_PROBE_S)  # so that the pulse has been felt since
        return None if not answers and self._late >= asked else answers

    async def _pulse(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LOOP_LAG_PROBE_S
            await asyncio.sleep(LOOP_LAG_PROBE_S)
            if loop.time() > due + LOOP_LAG_LIMIT_S:
                self._late = loop.time()

    def _bury(self, replica: Replica, why: str) -> None:
        if replica.name not in self.router.ranks:
            return
        moved = self.router.leave(replica.name)
        self._why_gone[replica.name] = why
        if not self.router.ranks:
            self._empty_since = asyncio.get_running_loop().time()
        log.warning("%s is gone (%s); %d sessions move", replica.name, why, len(moved))
        now = asyncio.get_running_loop().time()
        for limit in list(replica.pending):
            if not limit.expired():
                limit.reschedule(now)

    async def _welcome(self, replica: Replica) -> bool:
        if self._admit is not None and not await self._admit(replica.name):
            log.warning("%s is back but was not admitted", replica.name)
            return False
        async with self._changed:
            self.router.join(replica.name)
            replica.missed, self._empty_since = 0, None
            self._changed.notify_all()
        return True

    async def _balance(self) -> None:
        while True:
            await asyncio.sleep(self.settings.health_check_interval_s)
            self.router.rebalance(busy=tuple(self._busy))


def _again(rest: InferenceRequest, ask: InferenceRequest, failures: int) -> InferenceRequest:
    """What is asked next, under an id of its own: a replica that was only slow may still be busy
    with the one before, and refuses another of the same id."""
    return replace(rest, id=f"{ask.id}~{failures}") if ask.id else rest


class _Counted:
    """A session is busy while the block lasts."""

    def __init__(self, busy: dict[str, int], session: str) -> None:
        self.busy, self.session = busy, session

    def __enter__(self) -> None:
        self.busy[self.session] = self.busy.get(self.session, 0) + 1

    def __exit__(self, *_: object) -> None:
        self.busy[self.session] -= 1
        if not self.busy[self.session]:
            del self.busy[self.session]


class DeltaAccumulator:
    """What of a reply was passed on already, delta by delta."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[Segment] = []

    def add(self, delta: OutputDeltaLike) -> None:
        count = len(delta.token_ids)
        self._ids += delta.token_ids
        self._logprobs += delta.logprobs
        if count and self._versions and self._versions[-1].version == delta.version:
            self._versions[-1] = Segment(delta.version, self._versions[-1].tokens + count)
        elif count:
            self._versions.append(Segment(delta.version, count))

    def completion(self) -> Completion | None:
        if not self._ids:
            return None
        return Completion(
            token_ids=tuple(self._ids),
            logprobs=tuple(self._logprobs),
            versions=tuple(self._versions),
            finish="abort",
        )
