"""Routes for agents of a run: their task, its environment's tools, their end; rollouts to take."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request

from paddock.api import RequestBody, parse_body, protocol_for_path
from paddock.http import JsonRouter
from paddock.records import ApiError, ToolCall, json_codec
from paddock.rollout.agents import AgentPolicy
from paddock.rollout.gateway_access import AGENT_BASES, GatewayAccess
from paddock.rollout.rollout_queue import RolloutQueue
from paddock.text import message_to_openai

MAX_BODY_BYTES = 1 << 22
MAX_WAIT_S = 60.0  # of a worker for a rollout


class ToolCallsBody(RequestBody):
    """Calls of one reply: `{"name": ..., "arguments": {...}}` each, with an `id` if wanted."""

    calls: list[dict[str, Any]]


class NextRolloutBody(RequestBody):
    wait_s: float | None = None


class AgentRoutes:
    """`queues`: of the tasks whose rollouts workers ask for."""

    def __init__(self, access: GatewayAccess, queues: Mapping[str, RolloutQueue]) -> None:
        self.access, self.queues = access, queues

    def add_to(self, app: FastAPI) -> None:
        public = JsonRouter(app, protocol_for_path, MAX_BODY_BYTES)
        agent = replace(public, admit=self.access.agent)
        for base in AGENT_BASES:
            agent.add_route(f"{base}/v1/task", self.task, methods=("GET",))
            agent.add_route(f"{base}/v1/tools", self.call_tools, body=ToolCallsBody)
            agent.add_route(f"{base}/v1/reply", self.reply)
            agent.add_route(f"{base}/v1/end", self.end)
        worker = replace(public, admit=self.access.worker)
        worker.add_route("/tasks/{name}/rollouts/next", self.next_rollout, body=NextRolloutBody)

    async def task(self, http: Request, _value: Any) -> Any:
        return self._policy(http).endpoint.task

    async def call_tools(self, http: Request, value: Any) -> Any:
        calls = _parse_calls(parse_body(ToolCallsBody, value).calls)
        results = await self._policy(http).step(calls)
        return {
            "results": [
                {"id": each.tool_call_id, "role": each.role, "content": each.content}
                for each in results
            ]
        }

    async def reply(self, http: Request, _value: Any) -> Any:
        said = await self._policy(http).step(())
        return {"messages": [message_to_openai(message) for message in said]}

    async def end(self, http: Request, _value: Any) -> Any:
        self._policy(http).end()
        return {"status": "ok"}

    async def next_rollout(self, http: Request, value: Any) -> Any:
        wait_s = parse_body(NextRolloutBody, value).wait_s
        queue = self.queues.get(http.path_params["name"])
        if queue is None:
            raise ApiError(f"no task {http.path_params['name']!r:.80} to pull", status=404)
        found = await queue.take(min(MAX_WAIT_S, max(0.0, wait_s or 0.0)))
        if found is None and queue.over:
            raise ApiError("the run is over", status=410)
        return {"rollout": None if found is None else found.as_json()}

    def _policy(self, http: Request) -> AgentPolicy:
        agent = self.access.session_of(http).agent
        if agent is None:
            raise ApiError("this session is not a rollout of a run", status=404)
        return agent


def _parse_calls(raw: list[dict[str, Any]]) -> tuple[ToolCall, ...]:
    """
    >>> _parse_calls([{"name": "look", "arguments": {"n": "all"}}])
    (ToolCall(id='call_0', name='look', arguments={'n': 'all'}),)
    """
    if not raw:
        raise ApiError("calls: must not be empty", param="calls")
    try:
        return tuple(
            json_codec.decode(ToolCall, {"id": f"call_{i}"} | call) for i, call in enumerate(raw)
        )
    except json_codec.RecordDecodeError as error:
        raise ApiError(f"calls: {error}", param="calls") from None
