"""Verdicts of rollouts by agents elsewhere: of the environment, of a callback, or posted."""

import asyncio
from collections.abc import Awaitable, Callable

from paddock.envs import Env, RolloutFailed
from paddock.http import ConnectionPool
from paddock.records import Failure, Message, Task, ToolSpec, Verdict, json_codec
from paddock.rollout.client import EngineUnavailableError, RequestRejectedError
from paddock.rollout.session_manager import LiveSession
from paddock.rollout.settings import AgentSettings
from paddock.rollout.sglang_client import ServerClient
from paddock.text import message_to_openai


def scored(env: Env, settings: AgentSettings, live: LiveSession, http: ConnectionPool) -> Env:
    """The environment, with the verdict from where the settings say."""
    if settings.posted_verdict:
        # A process posts its verdict before it exits.
        wait_s = 0.0 if settings.command is not None else settings.reward_timeout_s
        return ScoredElsewhere(env, lambda: posted_verdict(live, wait_s))
    if settings.reward_url is not None:
        server = ServerClient(settings.reward_url, http, timeout_s=settings.reward_timeout_s)
        return ScoredElsewhere(env, lambda: reward_of_url(server, live))
    return env


class ScoredElsewhere:
    """An environment whose verdict comes from elsewhere."""

    def __init__(self, env: Env, score: Callable[[], Awaitable[Verdict]]) -> None:
        self._env, self._score = env, score

    @property
    def task(self) -> Task:
        return self._env.task

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        return self._env.tools

    async def reset(self) -> None:
        await self._env.reset()

    async def step(self, reply: Message) -> tuple[Message, ...]:
        return await self._env.step(reply)

    async def score(self) -> Verdict:
        return await self._score()

    async def close(self) -> None:
        await self._env.close()


async def posted_verdict(live: LiveSession, wait_s: float) -> Verdict:
    """The verdict that was posted, or is within `wait_s` of the agent's end."""
    try:
        async with asyncio.timeout(wait_s):
            await live.scored.wait()
    except TimeoutError:
        when = f"within {wait_s:g} s of the agent's end" if wait_s else "before the agent's end"
        raise RolloutFailed("grader", "verdict", f"none was posted {when}") from None
    if isinstance(live.outcome, Failure):
        raise RolloutFailed(live.outcome.kind, live.outcome.where, live.outcome.what)
    return live.outcome


async def reward_of_url(server: ServerClient, live: LiveSession) -> Verdict:
    """The verdict of a callback: POST of the task and the conversation of the newest branch."""
    assert live.agent is not None
    path = live.session.tree.nodes[-1].path() if live.session.tree.nodes else []
    turns = [node.messages() for node in path]
    body = {
        "task": live.agent.endpoint.task,
        "session": live.session.id,
        "messages": [message_to_openai(m) for new, reply in turns for m in (*new, reply)],
    }
    try:
        return json_codec.decode(Verdict, await server.post("", body))
    except EngineUnavailableError as error:
        raise RolloutFailed("infrastructure", "reward_url", str(error)) from error
    except (RequestRejectedError, json_codec.RecordDecodeError) as error:
        raise RolloutFailed("grader", "reward_url", str(error)) from error
