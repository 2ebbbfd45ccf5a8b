"""Rollouts by agents elsewhere: a process, a service or a worker that asks for them.

An agent gets a task and the key of its own session. Its turns go through the gateway; the tools of
the environment, if it has any, are called there too (agent_routes.py). `run_rollout` runs the
environment as for our own agent: `AgentPolicy` passes on what the agent does. An agent that dies
is an infrastructure failure: its rollout is begun again, with another session.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any

from paddock.envs import Env, RolloutFailed, RolloutTrace, Taskset, convert_errors, run_rollout
from paddock.http import ConnectionPool
from paddock.records import (
    ApiError,
    Failure,
    Message,
    Task,
    ToolCall,
    ToolSpec,
    Trajectory,
)
from paddock.rollout.agent_verdicts import scored
from paddock.rollout.client import (
    EngineUnavailableError,
    OverlongPromptError,
    RequestRejectedError,
)
from paddock.rollout.in_flight import failed_trajectory
from paddock.rollout.session_manager import LiveSession, SessionConfig, SessionManager
from paddock.rollout.settings import AgentSettings
from paddock.rollout.sglang_client import ServerClient
from paddock.rollout.task_schedule import RolloutSpec
from paddock.text import message_to_openai, tool_to_openai

__all__ = [
    "AgentEndpoint",
    "AgentRollout",
    "AgentSettings",
    "ReserveAgent",
    "RunAgent",
    "run_at_url",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEndpoint:
    """What an agent is told: its task, and where and as whom it takes its turns."""

    spec: RolloutSpec
    task: Mapping[str, Any]  # id, prompt, messages, tools, and what else its row has
    base_url: str  # of the gateway
    session: LiveSession
    tells_verdict: bool  # whether it is trusted to score itself

    def as_json(self) -> dict[str, Any]:
        spec, session = self.spec, self.session
        found = {
            "task": self.task,
            "name": spec.task,
            "number": spec.number,
            "member": spec.member,
            "seed": spec.seed,
            "session": spec.session_id,
            "base_url": self.base_url,
            "api_key": session.api_key,
        }
        if self.tells_verdict:
            found["verdict_url"] = f"{self.base_url}/sessions/{spec.session_id}/verdict"
            found["verdict_key"] = session.verdict_key
        return found


# Runs an agent to its end. Raises RolloutFailed if it dies; cancelling it ends the agent.
RunAgent = Callable[[AgentEndpoint], Awaitable[None]]
# Waits until an agent can be run. The time of a task begins after that.
ReserveAgent = Callable[[], AbstractAsyncContextManager[RunAgent]]


@dataclass(kw_only=True)
class AgentRollout:
    """RolloutFn of an agent elsewhere."""

    taskset: Taskset
    sessions: SessionManager
    rules: SessionConfig  # without a seed
    settings: AgentSettings
    reserve_agent: ReserveAgent
    base_url: str
    http: ConnectionPool

    async def __call__(self, spec: RolloutSpec) -> Sequence[Trajectory]:
        for _ in range(self.settings.max_retries):
            branches = await self._attempt(spec)
            if not _is_lost(branches[0]):
                return branches
        return await self._attempt(spec)

    async def _attempt(self, spec: RolloutSpec) -> Sequence[Trajectory]:
        sampling = replace(self.rules.sampling_params, seed=spec.seed)
        try:
            with convert_errors("world", "task"):
                task = self.taskset.task(spec.number)
            with convert_errors("world", "open"):
                env = self.taskset.make_env(task)
            live = self.sessions.open(
                spec.session_id, replace(self.rules, sampling_params=sampling)
            )
        except RolloutFailed as stop:
            return (failed_trajectory(spec, stop.failure),)
        except ApiError as error:
            return (failed_trajectory(spec, _lost_session(str(error))),)
        try:
            async with self.reserve_agent() as run_agent:
                trace = await self._play(env, live, run_agent, self._endpoint(spec, task, live))
        finally:
            was_open = self.sessions.close(live)
        outcome = trace.outcome
        if not was_open:
            outcome = _lost_session("closed before the rollout ended")
        return live.session.trajectories(task_id=task.id, group_id=spec.group_id, outcome=outcome)

    async def _play(
        self, env: Env, live: LiveSession, run_agent: RunAgent, endpoint: AgentEndpoint
    ) -> RolloutTrace:
        policy = live.agent = AgentPolicy(self.sessions, live, run_agent, endpoint)
        try:
            return await run_rollout(
                scored(env, self.settings, live, self.http),
                policy,
                trouble=self.sessions.generate.unavailable_reason,
            )
        finally:
            await policy.stop()

    def _endpoint(self, spec: RolloutSpec, task: Task, live: LiveSession) -> AgentEndpoint:
        details = getattr(self.taskset, "details", None)
        told = {
            **(details(task) if details is not None else {}),
            "id": task.id,
            "prompt": task.messages[-1].content,
            "messages": [message_to_openai(message) for message in task.messages],
        }
        return AgentEndpoint(
            spec=spec,
            task=told,
            base_url=self.base_url,
            session=live,
            tells_verdict=self.settings.posted_verdict,
        )


def _is_lost(branch: Trajectory) -> bool:
    """Whether the agent was lost, rather than the rollout failed."""
    outcome = branch.outcome
    return isinstance(outcome, Failure) and (outcome.kind, outcome.where) == (
        "infrastructure",
        "agent",
    )


def lost_agent(what: str) -> RolloutFailed:
    return RolloutFailed("infrastructure", "agent", what)


def _lost_session(what: str) -> Failure:
    return Failure(kind="infrastructure", where="session", what=what)


class AgentPolicy:
    """Policy whose replies an agent elsewhere decides: calls of the environment's tools and replies
    to its user, one after another, then its last reply."""

    def __init__(
        self,
        sessions: SessionManager,
        live: LiveSession,
        run_agent: RunAgent,
        endpoint: AgentEndpoint,
    ) -> None:
        self.live, self.endpoint = live, endpoint
        self._sessions, self._run_agent = sessions, run_agent
        self._replied = False
        self._running: asyncio.Future[None] | None = None
        self._steps: asyncio.Queue[_Step] = asyncio.Queue()
        self._taken: _Step | None = None  # whose answer is awaited
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __call__(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message:
        if self._running is None:
            told = {**self.endpoint.task, "tools": [tool_to_openai(tool) for tool in tools]}
            self.endpoint = replace(self.endpoint, task=told)
            self._running = asyncio.ensure_future(self._run_agent(self.endpoint))
        elif self._taken is not None:
            self._taken.answer(messages)
        step = asyncio.ensure_future(self._steps.get())
        try:
            either: set[asyncio.Future[Any]] = {step, self._running}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if step.done():
                self._taken = step.result()
                calls = self._taken.calls
                return self._reply_with(calls) if calls else await self._newest_reply()
        finally:
            step.cancel()
        try:
            self._running.result()
        except RolloutFailed as stop:
            raise self._blamed(stop) from stop
        return await self._last_reply()

    async def step(self, calls: tuple[ToolCall, ...]) -> tuple[Message, ...]:
        """Results of calls of the environment's tools. Without calls the agent's newest reply is
        for the environment's user: what the user says; nothing if the rollout is over."""
        if self._running is None or self._running.done():
            raise ApiError("the rollout is over", status=409)
        if not calls and not self.live.session.tree.nodes:
            raise ApiError("there is no reply yet: take a turn first", status=409)
        self._sessions.check_concurrency(self.live)
        step = _Step(calls)
        self._steps.put_nowait(step)
        with self.live.busy():
            return await step.answers

    def end(self) -> None:
        """The agent says that it is done."""
        if not self.ended.done():
            self.ended.set_result(None)

    async def stop(self) -> None:
        """End the agent and whatever waits for it."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
            with suppress(asyncio.CancelledError, RolloutFailed):
                self._running.result()
        left = [] if self._taken is None else [self._taken]
        while not self._steps.empty():
            left.append(self._steps.get_nowait())
        for step in left:
            step.end()

    def _reply_with(self, calls: tuple[ToolCall, ...]) -> Message:
        """The newest reply if it has these calls, as it usually has, else one without content."""
        nodes = self.live.session.tree.nodes
        reply = nodes[-1].messages()[1] if nodes else None
        same = reply is not None and [(c.name, c.arguments) for c in reply.tool_calls] == [
            (c.name, c.arguments) for c in calls
        ]
        if reply is None or not same:
            return Message(role="assistant", content="", tool_calls=calls)
        return replace(reply, tool_calls=calls)

    async def _last_reply(self) -> Message:
        if self._replied:
            what = "it ended, and the environment goes on: its user is answered at /v1/reply"
            raise RolloutFailed("world", "agent", what)
        self._replied = True
        return await self._newest_reply()

    async def _newest_reply(self) -> Message:
        await self.live.wait_delivered(self._sessions.settings.delivery_timeout_s)
        nodes = self.live.session.tree.nodes
        if not nodes:
            raise self._blamed(RolloutFailed("world", "agent", "it ended without a turn"))
        return replace(nodes[-1].messages()[1], tool_calls=())

    def _blamed(self, stop: RolloutFailed) -> RolloutFailed:
        """Whose fault the end of the agent is: the error of its last turn says it."""
        error = self.live.error
        overlong = isinstance(error, ApiError) and error.code == "context_length_exceeded"
        if overlong or isinstance(error, OverlongPromptError):
            return RolloutFailed("policy", "context", str(error))
        if isinstance(error, EngineUnavailableError):
            return RolloutFailed("infrastructure", "engine", str(error))
        return stop


class _Step:
    """Tool calls of an agent, or its newest reply if there are none, until the environment has
    answered."""

    def __init__(self, calls: tuple[ToolCall, ...]) -> None:
        self.calls = calls
        self.answers: asyncio.Future[tuple[Message, ...]] = (
            asyncio.get_running_loop().create_future()
        )

    def answer(self, messages: Sequence[Message]) -> None:
        """Take the messages after the last reply."""
        count = next(i for i, each in enumerate(reversed(messages)) if each.role == "assistant")
        if not self.answers.done():
            self.answers.set_result(tuple(messages[len(messages) - count :]))

    def end(self) -> None:
        """The rollout is over."""
        if self.answers.done():
            return
        if not self.calls:
            self.answers.set_result(())
        else:
            self.answers.set_exception(ApiError("the rollout is over", status=409))
            self.answers.exception()  # its request may be gone


async def run_at_url(server: ServerClient, endpoint: AgentEndpoint) -> None:
    """POST the rollout to a service; its response is the agent's end."""
    try:
        await server.post("", endpoint.as_json())
    except EngineUnavailableError as error:
        raise lost_agent(str(error)) from error
    except RequestRejectedError as error:
        raise RolloutFailed("world", "agent", str(error)) from error
