"""Tasks that live elsewhere: services that play attempts and say how each ended.

A service registers itself with the conductor and keeps saying that it is there. It is asked for one
attempt at a time; its agent, of whatever kind, talks to a session at the conductor's gateway, which
keeps the tokens. Back come a verdict or a failure, nothing else.

Services and the conductor share a key: whoever registers a task is handed sessions and says what
they are worth. Agents must not have it; they get the API key of their own session alone.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request

from paddock import __version__
from paddock.api import RequestBody, parse_body, protocol_for_path
from paddock.http import Authorize, ConnectionPool, JsonRouter, has_api_key
from paddock.records import ApiError, Failure, Outcome, Trajectory, Verdict, json_codec
from paddock.rollout.client import EngineUnavailableError, RequestRejectedError
from paddock.rollout.session_manager import LiveSession, SessionConfig, SessionManager
from paddock.rollout.sglang_client import ServerClient
from paddock.rollout.task_schedule import RolloutSpec

HEARTBEAT_S = 1.0
MAX_BODY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEndpoint:
    """Where an agent finds its session: what it sets as base URL and API key."""

    base_url: str  # /v1/chat/completions and the others lie below it
    api_key: str = field(repr=False)


# An attempt, by an agent that talks to the session given; ends in an outcome.
AgentFn = Callable[[RolloutSpec, SessionEndpoint], Awaitable[Outcome]]


class RolloutBody(RequestBody):
    """One attempt, as it is asked for."""

    task: str
    number: int
    member: int
    seed: int
    base_url: str  # see SessionEndpoint
    api_key: str


class RegisterBody(RequestBody):
    name: str
    url: str


# -- the service's side ----------------------------------------------------------------------------


def build_task_service(tasks: Mapping[str, AgentFn], *, key: str) -> FastAPI:
    """The application of a service. A caller that leaves cancels its attempt."""
    app = FastAPI(title="Paddock tasks", version=__version__, docs_url=None, redoc_url=None)

    async def play(_http: Request, value: Any) -> Any:
        body = parse_body(RolloutBody, value)
        if body.task not in tasks:
            there = ", ".join(tasks)
            raise ApiError(
                f"task: no task is called {body.task!r}; there are {there}", param="task"
            )
        given = RolloutSpec(task=body.task, number=body.number, member=body.member, seed=body.seed)
        session = SessionEndpoint(base_url=body.base_url, api_key=body.api_key)
        return {"outcome": json_codec.encode(await tasks[body.task](given, session))}

    async def health(_http: Request, _value: Any) -> Any:
        return {"status": "ok", "tasks": list(tasks)}

    JsonRouter(app, protocol_for_path, MAX_BODY_BYTES, admit=_admit(key)).add_route(
        "/rollouts", play, body=RolloutBody
    )
    JsonRouter(app, protocol_for_path, MAX_BODY_BYTES).add_route(
        "/health", health, methods=("GET",)
    )
    return app


async def register_periodically(conductor: ServerClient, names: Mapping[str, str]) -> None:
    """Say that these tasks are offered at these addresses, again and again, also while nobody
    listens: a conductor may come back."""
    while True:
        for name, url in names.items():
            try:
                await conductor.post("/tasks", {"name": name, "url": url})
            except EngineUnavailableError:
                break
        await asyncio.sleep(HEARTBEAT_S)


# -- the conductor's side --------------------------------------------------------------------------


@dataclass
class TaskServiceRegistry:
    """Who offers which task. Whoever is silent for three heartbeats is not there any more.

    >>> now = 0.0
    >>> registry = TaskServiceRegistry(clock=lambda: now)
    >>> registry.register("swe", "http://10.0.0.7:9000")
    >>> registry.services_for("swe")
    ('http://10.0.0.7:9000',)
    >>> now = 5.0
    >>> registry.services_for("swe")
    ()
    """

    clock: Callable[[], float] = time.monotonic
    expires_after_s: float = 3 * HEARTBEAT_S
    _heard: dict[tuple[str, str], float] = field(default_factory=dict)

    def register(self, name: str, url: str) -> None:
        self._heard[name, url.rstrip("/")] = self.clock()

    def services_for(self, name: str) -> tuple[str, ...]:
        fresh = self.clock() - self.expires_after_s
        return tuple(
            sorted(url for (task, url), at in self._heard.items() if task == name and at >= fresh)
        )

    def tasks(self) -> dict[str, tuple[str, ...]]:
        return {name: self.services_for(name) for name in sorted({name for name, _ in self._heard})}

    def add_routes(self, app: FastAPI, *, key: str) -> None:
        """Where services register: beside the gateway that their agents talk to."""

        async def register(_http: Request, value: Any) -> Any:
            body = parse_body(RegisterBody, value)
            if not body.url.startswith(("http://", "https://")):
                raise ApiError(f"url: {body.url!r:.80} is no address", param="url")
            self.register(body.name, body.url)
            return {"heartbeat_s": HEARTBEAT_S}

        async def every(_http: Request, _value: Any) -> Any:
            return {"tasks": self.tasks()}

        doors = JsonRouter(app, protocol_for_path, MAX_BODY_BYTES, admit=_admit(key))
        doors.add_route("/tasks", register, body=RegisterBody)
        doors.add_route("/tasks", every, methods=("GET",))


@dataclass(kw_only=True)
class RemoteRollout:
    """An Attempt that a service plays, in a session of the gateway in this process.

    A service that is not there, or is lost on the way, is a failure of the infrastructure, as is a
    session that cannot be opened or was closed by somebody else; a service that answers nonsense is
    a failure of the world.
    """

    registry: TaskServiceRegistry
    sessions: SessionManager
    session_config: SessionConfig
    gateway: str  # the address under which services reach it
    http: ConnectionPool
    api_key: str  # the services' own
    timeout_s: float = 3600.0  # the orchestrator gives up sooner, as each task has it
    _running: Counter[str] = field(default_factory=Counter)

    async def __call__(self, given: RolloutSpec) -> tuple[Trajectory, ...]:
        sampling = replace(self.session_config.sampling_params, seed=given.seed)
        try:
            live = self.sessions.open(
                given.session_id, replace(self.session_config, sampling_params=sampling)
            )
        except ApiError as error:
            return (_nothing(given, _lost(str(error))),)
        try:
            outcome = await self._outcome(given, live)
            await live.wait_delivered(self.sessions.settings.delivery_timeout_s)
        finally:
            was_open = self.sessions.close(live)
        if not was_open:
            outcome = _lost("the session was closed before the rollout ended")
        return live.session.trajectories(
            task_id=given.task_id, group_id=given.group_id, outcome=outcome
        )

    async def _outcome(self, given: RolloutSpec, live: LiveSession) -> Outcome:
        """Of the service that has least to do."""
        offering = self.registry.services_for(given.task)
        if not offering:
            return _lost(f"no service offers task '{given.task}' now")
        url = min(offering, key=lambda url: self._running[url])
        body = {
            "task": given.task,
            "number": given.number,
            "member": given.member,
            "seed": given.seed,
            "base_url": f"{self.gateway.rstrip('/')}/sessions/{given.session_id}",
            "api_key": live.api_key,
        }
        self._running[url] += 1
        try:
            server = ServerClient(url, self.http, api_key=self.api_key, timeout_s=self.timeout_s)
            return parse_outcome(await server.post("/rollouts", body))
        except EngineUnavailableError as error:
            return _lost(str(error))
        except RequestRejectedError as error:
            return Failure(kind="world", where="service", what=str(error))
        finally:
            self._running[url] -= 1


def parse_outcome(value: Any) -> Outcome:
    """What a service answered.

    >>> parse_outcome({"outcome": {"reward": 1}})
    Verdict(reward=1.0, parts={}, note='')
    >>> parse_outcome({"outcome": {"reward": None}}).what
    'an answer that is no outcome: Verdict.reward: expected float, got None'
    """
    said = value.get("outcome") if isinstance(value, dict) else None
    try:
        if isinstance(said, dict) and "reward" in said:
            return json_codec.decode(Verdict, said)
        return json_codec.decode(Failure, said)
    except json_codec.RecordDecodeError as error:
        what = f"an answer that is no outcome: {error}"
        return Failure(kind="world", where="service", what=what)


def _lost(what: str) -> Failure:
    return Failure(kind="infrastructure", where="service", what=what)


def _nothing(given: RolloutSpec, outcome: Outcome) -> Trajectory:
    return Trajectory(
        task_id=given.task_id,
        group_id=given.group_id,
        session_id=given.session_id,
        turns=(),
        outcome=outcome,
    )


def _admit(key: str) -> Authorize:
    if not key:
        raise ValueError("the key of task services must not be empty")

    def admit(http: Request) -> None:
        if not has_api_key(http.headers, key):
            raise ApiError("the key is missing or wrong", status=401, code="invalid_api_key")

    return admit
