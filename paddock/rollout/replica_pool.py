"""Replica pool: several engine replicas as one client, with health checks, retries and failover.

Requests go to the replica with the prefix cache of their session. A replica that fails two health
checks is removed, in less than two seconds by default; its requests are retried on another one:
tokens already streamed stay, and only the rest is requested. Every wait has a deadline. A health
check that timed out while this process itself was blocked does not count.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from logging import getLogger
from typing import Self, TypeVar

from pydantic import PositiveFloat, PositiveInt

from paddock.config import BaseSettings
from paddock.records import Completion, RequestOutput
from paddock.rollout.client import (
    EngineUnavailableError,
    InferenceClient,
    InferenceRequest,
    OutputDelta,
)
from paddock.rollout.continuation import (
    DeltaAccumulator,
    can_continue,
    continuation_request,
    merge_partial_output,
)
from paddock.rollout.session_router import SessionRouter
from paddock.rollout.task_health import RunAbortedError

log = getLogger("paddock.rollout")

_T = TypeVar("_T")
HealthCheck = Callable[[float], Awaitable[bool]]  # argument: timeout in seconds
LOOP_LAG_PROBE_S = 0.02  # interval of measuring the lag of this event loop
LOOP_LAG_LIMIT_S = 0.1  # more lag makes a failed health check inconclusive
FAILURES_BEFORE_REASSIGN = 3  # of a live replica, before a session moves to another one


class ReplicaPoolSettings(BaseSettings):
    health_check_interval_s: PositiveFloat = 0.5  # between health checks
    health_check_timeout_s: PositiveFloat = 0.4  # of one health check
    health_failure_threshold: PositiveInt = 2  # consecutive failures, before a replica is removed
    request_timeout_s: PositiveFloat = 900.0  # of a request, including retries
    max_backoff_s: PositiveFloat = 1.0
    unreachable_timeout_s: PositiveFloat = 600.0  # without a live replica, before the run aborts


class Replica:
    """One engine or server, with a name that stays the same after a restart."""

    def __init__(self, name: str, generate: InferenceClient, alive: HealthCheck) -> None:
        self.name, self.generate, self.alive = name, generate, alive
        self.missed = 0
        self.pending: set[asyncio.Timeout] = (
            set()
        )  # timeouts of requests, expired when it is removed


class ReplicaPool:
    """InferenceClient over replicas. Use it with `async with`, which runs the health checks.

    `admit` is awaited before a new or restarted replica gets requests: it syncs the weights of the
    replica and returns whether that succeeded.
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
        self._busy: dict[str, int] = {}  # running requests of each session
        self._changed = asyncio.Condition()
        self._health_checks: dict[str, asyncio.Task[None]] = {}
        self._chores: list[asyncio.Task[None]] = []
        self._late = float("-inf")  # when the event loop of this process last lagged
        self._empty_since: float | None = None  # since when there is no live replica
        self._why_gone: dict[str, str] = {}  # last reason of removal of each replica

    async def __aenter__(self) -> Self:
        for replica in self.replicas.values():
            self._start_health_checks(replica)
        self._chores = [
            asyncio.create_task(self._balance()),
            asyncio.create_task(self._measure_loop_lag()),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._health_checks.values(), *self._chores]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- members ----------------------------------------------------------------------------------

    @property
    def live_replicas(self) -> tuple[str, ...]:
        return self.router.ranks

    async def add(self, replica: Replica) -> bool:
        """Add a replica; whether it was admitted. If not, its next health check retries."""
        self.replicas[replica.name] = replica
        self._start_health_checks(replica)
        return await self._admit_replica(replica)

    async def remove(self, name: str) -> None:
        """Remove a replica; its running requests are retried on others."""
        health_check = self._health_checks.pop(name, None)
        if health_check is not None:
            health_check.cancel()
            await asyncio.gather(health_check, return_exceptions=True)
        replica = self.replicas.pop(name)
        self._remove(replica, "it was removed")

    # --- requests ---------------------------------------------------------------------------------

    async def generate(self, request: InferenceRequest) -> RequestOutput:
        end = asyncio.get_running_loop().time() + self.settings.request_timeout_s
        before: Completion | None = None
        current, failures = request, 0
        with _busy_session(self._busy, request.session_id):
            while True:
                replica = await self._route(current, end)
                try:
                    output = await self._wait(replica, replica.generate.generate(current), end)
                except EngineUnavailableError as error:
                    failures += 1
                    await self._failed(replica, current, error, failures, end)
                    current = _retry(current, request, failures)
                    continue
                merged = merge_partial_output(before, output, request)
                rest = self._rest_of_aborted(request, merged.completion)
                if rest is None:
                    self._update_load(request, merged.completion)
                    return merged
                failures += 1
                if rest is not request:
                    before = merged.completion
                current = _retry(rest, request, failures)
                await self._pause(failures, end)

    async def stream(self, request: InferenceRequest) -> AsyncGenerator[OutputDelta, None]:
        end = asyncio.get_running_loop().time() + self.settings.request_timeout_s
        current, failures, streamed = request, 0, DeltaAccumulator()
        with _busy_session(self._busy, request.session_id):
            while True:
                replica, before = await self._route(current, end), streamed.completion()
                failures += 1
                try:
                    async with aclosing(self._deltas(replica, current, end)) as deltas:
                        async for delta in deltas:
                            streamed.add(delta)
                            output = delta.output and merge_partial_output(
                                before, delta.output, request
                            )
                            if output and self._rest_of_aborted(request, output.completion):
                                output = None
                            if output or delta.token_ids:
                                yield OutputDelta(
                                    token_ids=delta.token_ids,
                                    logprobs=delta.logprobs,
                                    version=delta.version,
                                    top_logprobs=delta.top_logprobs,
                                    output=output,
                                )
                            if output:
                                self._update_load(request, output.completion)
                                return
                    await self._pause(failures, end)
                except EngineUnavailableError as error:
                    await self._failed(replica, current, error, failures, end)
                current = _retry(self._after(request, streamed.completion()), request, failures)

    async def _deltas(
        self, replica: Replica, request: InferenceRequest, end: float
    ) -> AsyncGenerator[OutputDelta, None]:
        """The stream of a replica, with a deadline for each delta."""
        async with aclosing(replica.generate.stream(request)) as deltas:
            while True:
                delta = await self._wait(replica, anext(deltas, None), end)
                if delta is None:
                    raise EngineUnavailableError(f"{replica.name}: the stream broke off")
                yield delta
                if delta.output is not None:
                    return

    async def while_alive(self, name: str, work: Awaitable[_T]) -> _T:
        """The result of `work`, which waits for a replica. Raises EngineUnavailableError when the
        replica is removed."""
        is_alive = name in self.router.ranks  # else its removal has already happened
        timeout_s = (
            self.settings.request_timeout_s if is_alive else self.settings.health_check_timeout_s
        )
        end = asyncio.get_running_loop().time() + timeout_s
        return await self._wait(self.replicas[name], work, end)

    def end_session(self, session: str) -> None:
        self.router.end(session)
        for replica in self.replicas.values():
            replica.generate.end_session(session)

    def _rest_of_aborted(
        self, request: InferenceRequest, done: Completion
    ) -> InferenceRequest | None:
        """The request for the rest if an engine aborted the completion, as some do at a weight
        sync; the original request if it must start again."""
        if done.finish != "abort":
            return None
        return (
            continuation_request(request, done)
            if can_continue(request.sampling_params)
            else request
        )

    def _after(self, request: InferenceRequest, streamed: Completion | None) -> InferenceRequest:
        """The request for the rest when part of the completion was already streamed."""
        if streamed is None:
            return request
        rest = (
            continuation_request(request, streamed)
            if can_continue(request.sampling_params)
            else None
        )
        if rest is None:
            raise EngineUnavailableError(
                "the engine was lost in the middle of a reply that cannot be continued"
            )
        return rest

    async def _route(self, request: InferenceRequest, end: float) -> Replica:
        """The replica for a request; waits for one if there is none. Raises RunAbortedError after
        `unreachable_timeout_s` without a live replica."""
        async with self._changed:
            while not self.router.ranks:
                if self._empty_since is None:
                    self._empty_since = asyncio.get_running_loop().time()
                abort_at = self._empty_since + self.settings.unreachable_timeout_s
                try:
                    async with asyncio.timeout_at(min(end, abort_at)):
                        await self._changed.wait()
                except TimeoutError:
                    if end < abort_at:
                        raise EngineUnavailableError(
                            f"no engine is alive: {self.unavailable_reason()}"
                        ) from None
                    seconds = self.settings.unreachable_timeout_s
                    raise RunAbortedError(
                        f"no engine has answered for {seconds:g} s: {self.unavailable_reason()}"
                    ) from None
        return self.replicas[self.router.route(request.session_id, len(request.token_ids))]

    def unavailable_reason(self) -> str:
        if self.router.ranks:
            return ""
        return "; ".join(f"{name}: {self._why_gone.get(name, 'gone')}" for name in self.replicas)

    async def _wait(self, replica: Replica, work: Awaitable[_T], end: float) -> _T:
        """The result of `work`. Raises EngineUnavailableError if the replica is removed or the
        deadline passes first."""
        limit = asyncio.timeout_at(end)
        try:
            async with limit:
                replica.pending.add(limit)
                try:
                    return await work
                finally:
                    replica.pending.discard(limit)
        except TimeoutError:
            raise EngineUnavailableError(f"{replica.name} was removed or timed out") from None

    async def _failed(
        self,
        replica: Replica,
        request: InferenceRequest,
        error: Exception,
        failures: int,
        end: float,
    ) -> None:
        """Check the health of a replica after a failed request, and back off before the retry."""
        log.warning("session %s: %s: %s", request.session_id, replica.name, error)
        if asyncio.get_running_loop().time() >= end:
            raise EngineUnavailableError(
                f"{failures} attempts within {self.settings.request_timeout_s:g} s: {error}"
            )
        if replica.name in self.router.ranks:
            if await self._check_health(replica) is False:
                self._remove(replica, str(error))
            elif failures % FAILURES_BEFORE_REASSIGN == 0:
                self.router.reassign(request.session_id)
        await self._pause(failures, end)

    async def _pause(self, failures: int, end: float) -> None:
        if failures > 1:
            backoff = min(self.settings.max_backoff_s, 0.02 * 2**failures)
            left = end - asyncio.get_running_loop().time()
            await asyncio.sleep(max(0.0, min(backoff, left)))

    def _update_load(self, request: InferenceRequest, done: Completion) -> None:
        self.router.update_load(request.session_id, len(request.token_ids) + len(done.token_ids))

    # --- health checks ----------------------------------------------------------------------------

    def _start_health_checks(self, replica: Replica) -> None:
        self._health_checks[replica.name] = asyncio.create_task(self._run_health_checks(replica))

    async def _run_health_checks(self, replica: Replica) -> None:
        while True:
            await asyncio.sleep(self.settings.health_check_interval_s)
            healthy = await self._check_health(replica)
            if healthy:
                replica.missed = 0
                if replica.name not in self.router.ranks:
                    await self._admit_replica(replica)
            elif healthy is False:
                replica.missed += 1
                if replica.missed >= self.settings.health_failure_threshold:
                    self._remove(replica, f"{replica.missed} health checks failed")

    async def _check_health(self, replica: Replica) -> bool | None:
        """Whether the replica is healthy; None if the event loop of this process lagged."""
        loop = asyncio.get_running_loop()
        started, healthy = loop.time(), False
        with suppress(TimeoutError):
            async with asyncio.timeout(self.settings.health_check_timeout_s):
                healthy = await replica.alive(self.settings.health_check_timeout_s)
        if not healthy:
            await asyncio.sleep(LOOP_LAG_PROBE_S)  # so that the lag has been measured since
        return None if not healthy and self._late >= started else healthy

    async def _measure_loop_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LOOP_LAG_PROBE_S
            await asyncio.sleep(LOOP_LAG_PROBE_S)
            if loop.time() > due + LOOP_LAG_LIMIT_S:
                self._late = loop.time()

    def _remove(self, replica: Replica, why: str) -> None:
        if replica.name not in self.router.ranks:
            return
        moved = self.router.leave(replica.name)
        self._why_gone[replica.name] = why
        if not self.router.ranks:
            self._empty_since = asyncio.get_running_loop().time()
        log.warning("%s removed (%s); %d sessions are rerouted", replica.name, why, len(moved))
        now = asyncio.get_running_loop().time()
        for limit in list(replica.pending):
            if not limit.expired():
                limit.reschedule(now)

    async def _admit_replica(self, replica: Replica) -> bool:
        if self._admit is not None and not await self._admit(replica.name):
            log.warning("%s is healthy but was not admitted", replica.name)
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


def _retry(rest: InferenceRequest, request: InferenceRequest, failures: int) -> InferenceRequest:
    """The retry under a new request id: a slow replica may still run the one before and would
    reject the same id."""
    return replace(rest, id=f"{request.id}~{failures}") if request.id else rest


@contextmanager
def _busy_session(busy: dict[str, int], session: str) -> Iterator[None]:
    """Mark a session as busy within the block."""
    busy[session] = busy.get(session, 0) + 1
    try:
        yield
    finally:
        busy[session] -= 1
        if not busy[session]:
            del busy[session]
