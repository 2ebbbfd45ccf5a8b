"""Task services: rollouts run by agents in other processes, over HTTP.

A service registers with the orchestrator and sends heartbeats. Each request is one rollout: the
service's agent uses a session of the orchestrator's gateway, which records the tokens, and the
service returns a verdict or a failure.

Services and orchestrator share a key, since a registered service decides rewards. Agents must not
have it; they get only the API key of their own session.
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
    """Base URL and API key of an agent's session."""

    base_url: str  # of /v1/chat/completions and the other APIs
    api_key: str = field(repr=False)


# Runs one rollout with an agent that uses the session; returns its outcome.
AgentFn = Callable[[RolloutSpec, SessionEndpoint], Awaitable[Outcome]]


class RolloutBody(RequestBody):
    """Request body of one rollout."""

    task: str
    number: int
    member: int
    seed: int
    base_url: str  # see SessionEndpoint
    api_key: str


class RegisterBody(RequestBody):
    name: str
    url: str


# -- service ---------------------------------------------------------------------------------------


def build_task_service(tasks: Mapping[str, AgentFn], *, key: str) -> FastAPI:
    """The HTTP application of a service. A rollout is cancelled when its caller disconnects."""
    app = FastAPI(title="Paddock tasks", version=__version__, docs_url=None, redoc_url=None)

    async def run_rollout(_http: Request, value: Any) -> Any:
        body = parse_body(RolloutBody, value)
        if body.task not in tasks:
            raise ApiError(
                f"task {body.task!r} not found; must be one of {', '.join(tasks)}", param="task"
            )
        spec = RolloutSpec(task=body.task, number=body.number, member=body.member, seed=body.seed)
        session = SessionEndpoint(base_url=body.base_url, api_key=body.api_key)
        return {"outcome": json_codec.encode(await tasks[body.task](spec, session))}

    async def health(_http: Request, _value: Any) -> Any:
        return {"status": "ok", "tasks": list(tasks)}

    JsonRouter(app, protocol_for_path, MAX_BODY_BYTES, admit=_admit(key)).add_route(
        "/rollouts", run_rollout, body=RolloutBody
    )
    JsonRouter(app, protocol_for_path, MAX_BODY_BYTES).add_route(
        "/health", health, methods=("GET",)
    )
    return app


async def register_periodically(orchestrator: ServerClient, names: Mapping[str, str]) -> None:
    """Register these tasks at these URLs every HEARTBEAT_S seconds, also while the orchestrator is
    down: it may restart."""
    while True:
        for name, url in names.items():
            try:
                await orchestrator.post("/tasks", {"name": name, "url": url})
            except EngineUnavailableError:
                break
        await asyncio.sleep(HEARTBEAT_S)


# -- orchestrator ----------------------------------------------------------------------------------


@dataclass
class TaskServiceRegistry:
    """Which services offer which task. A service expires after three missed heartbeats.

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
    _last_heartbeat: dict[tuple[str, str], float] = field(default_factory=dict)

    def register(self, name: str, url: str) -> None:
        self._last_heartbeat[name, url.rstrip("/")] = self.clock()

    def services_for(self, name: str) -> tuple[str, ...]:
        fresh = self.clock() - self.expires_after_s
        return tuple(
            sorted(
                url
                for (task, url), at in self._last_heartbeat.items()
                if task == name and at >= fresh
            )
        )

    def tasks(self) -> dict[str, tuple[str, ...]]:
        return {
            name: self.services_for(name)
            for name in sorted({name for name, _ in self._last_heartbeat})
        }

    def add_routes(self, app: FastAPI, *, key: str) -> None:
        """Add the registration routes to the app of the gateway."""

        async def register(_http: Request, value: Any) -> Any:
            body = parse_body(RegisterBody, value)
            if not body.url.startswith(("http://", "https://")):
                raise ApiError(
                    f"url must start with http:// or https://, got {body.url!r:.80}", param="url"
                )
            self.register(body.name, body.url)
            return {"heartbeat_s": HEARTBEAT_S}

        async def list_tasks(_http: Request, _value: Any) -> Any:
            return {"tasks": self.tasks()}

        router = JsonRouter(app, protocol_for_path, MAX_BODY_BYTES, admit=_admit(key))
        router.add_route("/tasks", register, body=RegisterBody)
        router.add_route("/tasks", list_tasks, methods=("GET",))


@dataclass(kw_only=True)
class RemoteRollout:
    """RolloutFn that runs on a task service, with a session of the gateway in this process.

    An unavailable service, and a session that cannot be opened or was closed meanwhile, are
    infrastructure failures; an invalid response of a service is an environment failure.
    """

    registry: TaskServiceRegistry
    sessions: SessionManager
    session_config: SessionConfig
    gateway: str  # its URL as seen by the services
    http: ConnectionPool
    api_key: str  # shared with the services
    timeout_s: float = 3600.0  # tasks have shorter timeouts of their own
    _running: Counter[str] = field(default_factory=Counter)

    async def __call__(self, spec: RolloutSpec) -> tuple[Trajectory, ...]:
        sampling = replace(self.session_config.sampling_params, seed=spec.seed)
        try:
            live = self.sessions.open(
                spec.session_id, replace(self.session_config, sampling_params=sampling)
            )
        except ApiError as error:
            return (_empty_trajectory(spec, _unavailable(str(error))),)
        try:
            outcome = await self._outcome(spec, live)
            await live.wait_delivered(self.sessions.settings.delivery_timeout_s)
        finally:
            was_open = self.sessions.close(live)
        if not was_open:
            outcome = _unavailable("the session was closed before the rollout ended")
        return live.session.trajectories(
            task_id=spec.task_id, group_id=spec.group_id, outcome=outcome
        )

    async def _outcome(self, spec: RolloutSpec, live: LiveSession) -> Outcome:
        """The outcome returned by the least loaded service."""
        offering = self.registry.services_for(spec.task)
        if not offering:
            return _unavailable(f"no service for task '{spec.task}' is registered")
        url = min(offering, key=lambda url: self._running[url])
        body = {
            "task": spec.task,
            "number": spec.number,
            "member": spec.member,
            "seed": spec.seed,
            "base_url": f"{self.gateway.rstrip('/')}/sessions/{spec.session_id}",
            "api_key": live.api_key,
        }
        self._running[url] += 1
        try:
            server = ServerClient(url, self.http, api_key=self.api_key, timeout_s=self.timeout_s)
            return parse_outcome(await server.post("/rollouts", body))
        except EngineUnavailableError as error:
            return _unavailable(str(error))
        except RequestRejectedError as error:
            return Failure(kind="world", where="service", what=str(error))
        finally:
            self._running[url] -= 1


def parse_outcome(value: Any) -> Outcome:
    """The outcome in a service's response; an environment failure if it is invalid.

    >>> parse_outcome({"outcome": {"reward": 1}})
    Verdict(reward=1.0, parts={}, note='')
    >>> parse_outcome({"outcome": {"reward": None}}).what
    'invalid outcome: Verdict.reward: expected float, got None'
    """
    outcome = value.get("outcome") if isinstance(value, dict) else None
    try:
        if isinstance(outcome, dict) and "reward" in outcome:
            return json_codec.decode(Verdict, outcome)
        return json_codec.decode(Failure, outcome)
    except json_codec.RecordDecodeError as error:
        what = f"invalid outcome: {error}"
        return Failure(kind="world", where="service", what=what)


def _unavailable(what: str) -> Failure:
    return Failure(kind="infrastructure", where="service", what=what)


def _empty_trajectory(spec: RolloutSpec, outcome: Outcome) -> Trajectory:
    return Trajectory(
        task_id=spec.task_id,
        group_id=spec.group_id,
        session_id=spec.session_id,
        turns=(),
        outcome=outcome,
    )


def _admit(key: str) -> Authorize:
    if not key:
        raise ValueError("the task service key must not be empty")

    def admit(http: Request) -> None:
        if not has_api_key(http.headers, key):
            raise ApiError("invalid or missing key", status=401, code="invalid_api_key")

    return admit
