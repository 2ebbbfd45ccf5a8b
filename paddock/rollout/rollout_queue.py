"""Rollouts of a task whose agents are workers that ask for them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from paddock.rollout.agents import AgentEndpoint, RunAgent, lost_agent


@dataclass(frozen=True, slots=True)
class _WaitingWorker:
    endpoint: asyncio.Future[AgentEndpoint | None]  # what it is given
    timeout: asyncio.Timeout


@dataclass
class RolloutQueue:
    """Workers that ask for rollouts of a task, and rollouts that wait for a worker.

    A worker that has taken one and sends no request for `idle_timeout_s` is lost."""

    idle_timeout_s: float
    over: bool = False  # there are no more rollouts
    num_waiting: int = 0  # rollouts without a worker
    _waiting: asyncio.Queue[_WaitingWorker] = field(default_factory=asyncio.Queue)

    @asynccontextmanager
    async def reserve(self) -> AsyncIterator[RunAgent]:
        """Wait for a worker, which then waits for the rollout to begin."""
        self.num_waiting += 1
        try:
            while (worker := await self._waiting.get()).endpoint.done():
                pass  # it has given up
        finally:
            self.num_waiting -= 1
        worker.timeout.reschedule(None)
        try:
            yield partial(self._run_agent, worker)
        finally:
            if not worker.endpoint.done():
                worker.endpoint.set_result(None)

    async def _run_agent(self, worker: _WaitingWorker, endpoint: AgentEndpoint) -> None:
        live = endpoint.session
        assert live.agent is not None
        if worker.endpoint.done():
            raise lost_agent("its worker has disconnected")
        worker.endpoint.set_result(endpoint)
        live.touch()
        ends = (live.agent.ended, asyncio.ensure_future(live.scored.wait()))
        try:
            while not any(end.done() for end in ends):
                idle = live.idle_s
                if idle >= self.idle_timeout_s:
                    raise lost_agent(f"no request of its worker for {idle:.0f} s")
                await asyncio.wait(
                    ends, timeout=self.idle_timeout_s - idle, return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            ends[1].cancel()

    async def take(self, wait_s: float) -> AgentEndpoint | None:
        """The next rollout for a worker; None if there is none within `wait_s`."""
        if self.over:
            return None
        endpoint: asyncio.Future[AgentEndpoint | None] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(wait_s) as timeout:
                self._waiting.put_nowait(_WaitingWorker(endpoint, timeout))
                return await endpoint
        except TimeoutError:
            return None
        finally:
            if endpoint.cancelled():
                self._drop_gone()

    def _drop_gone(self) -> None:
        for _ in range(self._waiting.qsize()):
            worker = self._waiting.get_nowait()
            if not worker.endpoint.done():
                self._waiting.put_nowait(worker)

    def end(self) -> None:
        """The run is over: no worker waits any longer."""
        self.over = True
        while not self._waiting.empty():
            worker = self._waiting.get_nowait()
            if not worker.endpoint.done():
                worker.endpoint.set_result(None)
