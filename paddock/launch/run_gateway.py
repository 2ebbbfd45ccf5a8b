"""The gateway of an RL run, for tasks whose agents are elsewhere."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from secrets import token_urlsafe
from typing import TYPE_CHECKING

from paddock.launch.agent_process import ProcessAgent

if TYPE_CHECKING:
    import socket

    from fastapi import FastAPI

    from paddock.envs import Taskset
    from paddock.http import ConnectionPool
    from paddock.records import SamplingParams
    from paddock.rl import RLSettings
    from paddock.rollout import RolloutWorker, agents, gateway

GATEWAY_FILE = "gateway.json"  # of the run folder: where it is, and its keys


class RunGateway:
    """Sessions for the agents of a run. `url` is the gateway as agents reach it, `app` its HTTP
    application."""

    app: "FastAPI"

    def __init__(
        self, sessions: "gateway.SessionManager", url: str, http: "ConnectionPool"
    ) -> None:
        self.sessions, self.url, self.http = sessions, url, http
        self.queues: dict[str, gateway.RolloutQueue] = {}

    def rollout_fn(
        self,
        name: str,
        settings: "agents.AgentSettings",
        taskset: "Taskset",
        worker: "RolloutWorker",
        sampling: "SamplingParams",
    ) -> "agents.AgentRollout":
        """Rollouts of a task by its agent, with the session configuration of `worker`."""
        from paddock.rollout import agents, gateway

        rules = gateway.SessionConfig(
            sampling_params=sampling,
            thinking=worker.thinking,
            matcher=worker.matcher,
            context_management=worker.context_management,
        )
        return agents.AgentRollout(
            taskset=taskset,
            sessions=self.sessions,
            rules=rules,
            settings=settings,
            reserve_agent=self._reserve_agent(name, settings),
            base_url=self.url,
            http=self.http,
        )

    def _reserve_agent(self, name: str, settings: "agents.AgentSettings") -> "agents.ReserveAgent":
        from paddock.rollout import agents, gateway, sglang_client

        if settings.command is not None:
            agent = ProcessAgent(settings.command)
            return lambda: nullcontext(agent.run_agent)
        if settings.url is not None:
            # The attempt timeout of the task ends it.
            server = sglang_client.ServerClient(settings.url, self.http, timeout_s=1e9)
            return lambda: nullcontext(partial(agents.run_at_url, server))
        # A task that is registered again keeps its queue, in which some may wait.
        self.queues.setdefault(name, gateway.RolloutQueue(settings.idle_timeout_s))
        return self.queues[name].reserve


@asynccontextmanager
async def open_run_gateway(
    settings: "RLSettings", worker: "RolloutWorker", folder: Path
) -> AsyncIterator[RunGateway]:
    """The gateway of a run, listening; its address and keys are in the run folder."""
    from paddock.http import bind_socket, socket_url
    from paddock.rollout import gateway, sglang_client

    config = settings.gateway
    admin_key = config.admin_key or os.environ.get("PADDOCK_ADMIN_KEY") or token_urlsafe(32)
    worker_key = token_urlsafe(32)
    limits = config.model_copy(update={"context_length": worker.context_length})
    sessions = gateway.SessionManager(worker.client, worker.renderer, limits)
    with bind_socket(config.host, config.port) as sock:
        async with sglang_client.connection_pool() as http:
            opened = RunGateway(sessions, config.url or socket_url(sock), http)
            opened.app = app = gateway.build_gateway(
                sessions, admin_key=admin_key, worker_key=worker_key, queues=opened.queues
            )
            _write_secret(
                folder / GATEWAY_FILE,
                {"url": opened.url, "admin_key": admin_key, "worker_key": worker_key},
            )
            async with serving(app, sock):
                try:
                    yield opened
                finally:
                    for queue in opened.queues.values():
                        queue.end()


@asynccontextmanager
async def serving(app: "FastAPI", sock: "socket.socket") -> AsyncIterator[None]:
    """An application served by this event loop. Signals are left to the process."""
    import uvicorn

    from paddock.http import uvicorn_config

    server = uvicorn.Server(uvicorn_config(app, timeout_graceful_shutdown=1))
    server.capture_signals = nullcontext  # type: ignore[method-assign,assignment]
    running = asyncio.ensure_future(server.serve(sockets=[sock]))
    try:
        while not server.started:
            await asyncio.sleep(0.01)
            if running.done():
                running.result()
        yield
    finally:
        server.should_exit = True
        await running


def _write_secret(file: Path, value: dict[str, str]) -> None:
    """Readable by this user only."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        json.dump(value, out)
