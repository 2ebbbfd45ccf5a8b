"""Environment `openenv`: servers that speak OpenEnv's protocol, `reset` and `step` in JSON.

A rollout is one session: a WebSocket at /ws, as OpenEnv's own clients open it, or plain POSTs to
/reset and /step that carry an `episode_id`, for simpler servers.
"""

import asyncio
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal, Protocol

import httpx
from pydantic import Field

from paddock.envs.datasets import row_in_epochs
from paddock.envs.env import RolloutFailed, Split
from paddock.envs.qa import parse_task_id
from paddock.envs.registry import EnvError, EnvSettings
from paddock.envs.tools import Tool, ToolError, execute_tool_calls
from paddock.records import Budget, Message, Task, ToolSpec, Verdict

_MAX_REPLY_BYTES = 16 << 20
_HIDDEN = {"done", "reward", "metadata"}  # of an observation: not for the model
_MCP_ACTIONS = {"Action", "CallToolAction", "ListToolsAction"}  # its actions are calls of its tools
# What the server says of an action that does not fit the schema; the model may try again.
_INVALID_ACTION = {"VALIDATION_ERROR", "INVALID_JSON"}


class OpenEnvSettings(EnvSettings):
    task_keys: ClassVar[tuple[str, ...]] = ("resets", "num_test", "seed")

    url: str = ""  # of the server: "http://host:8000"
    transport: Literal["websocket", "http"] = "websocket"
    instruction: str = ""  # what the model is told before the first observation
    # tool: the model acts by calling tools; text: its reply is the action
    actions: Literal["tool", "text"] = "tool"
    resets: tuple[dict[str, Any], ...] = ()  # arguments of reset, one task each; (): seeds, no end
    num_test: Annotated[int, Field(ge=0)] = 0  # the first of `resets`, which are never trained on
    seed: int = 0  # of the order after the first epoch
    max_turns: Annotated[int, Field(ge=1)] = 16
    timeout_s: Annotated[float, Field(gt=0)] = 600.0  # of a rollout
    step_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    output_bytes: Annotated[int, Field(ge=1)] = 20_000  # of one observation; the rest is cut

    def make_taskset(self) -> "OpenEnvTaskset":
        if not self.url.startswith(("http://", "https://")):
            raise EnvError(f"url must start with http:// or https://, got {self.url!r}")
        if self.transport == "websocket" and not find_spec("websockets"):
            raise EnvError("websockets is not installed: pip install 'paddock[envs]'")
        try:
            reply = httpx.get(f"{self.url.rstrip('/')}/schema", timeout=self.step_timeout_s)
            reply.raise_for_status()
            action = reply.json()["action"]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            what = f"{type(error).__name__}: {error}"
            raise EnvError(f"no action schema at {self.url}/schema: {what}") from None
        return OpenEnvTaskset(self, action)


class OpenEnvTaskset:
    """A task for each entry of `resets`, or for each seed; odd seeds are the training tasks."""

    name = "openenv"

    def __init__(self, settings: OpenEnvSettings, action_schema: dict[str, Any]) -> None:
        self._settings, self._schema = settings, action_schema

    def size(self, split: Split) -> int | None:
        count, num_test = len(self._settings.resets), self._settings.num_test
        if not count:
            return None
        return min(num_test, count) if split == "test" else max(0, count - num_test)

    def task(self, index: int, split: Split = "train") -> Task:
        """The task; its first observation comes with `reset`."""
        size, settings = self.size(split), self._settings
        if size == 0:
            raise EnvError(f"there are no {split} tasks; see 'resets' and 'num_test'")
        row = index if size is None else row_in_epochs(settings.seed, index, size)
        opening = settings.instruction or "(the environment opens the conversation)"
        return Task(
            id=f"{self.name}/{settings.shape_hash}/{split}/{row}",
            env=self.name,
            messages=(Message(role="user", content=opening),),
            budget=Budget(
                turns=settings.max_turns,
                seconds=settings.timeout_s,
                output_bytes=settings.output_bytes,
            ),
        )

    def make_env(self, task: Task) -> "OpenEnvEnv":
        split, row = parse_task_id(task, self.name, self._settings.shape_hash)
        return OpenEnvEnv(task, self._settings, self._schema, self._reset_args(split, row))

    def _reset_args(self, split: Split, row: int) -> Mapping[str, Any]:
        settings = self._settings
        if not settings.resets:
            return {"seed": 2 * row + (split == "train")}
        return settings.resets[row + (settings.num_test if split == "train" else 0)]


class OpenEnvEnv:
    """One session; its rewards are added up."""

    def __init__(
        self,
        task: Task,
        settings: OpenEnvSettings,
        action_schema: dict[str, Any],
        reset_args: Mapping[str, Any],
    ) -> None:
        self.task = task
        self._settings, self._schema, self._reset_args = settings, action_schema, reset_args
        self._stack = AsyncExitStack()
        self._session: _Session
        self._reward, self._steps, self._done = 0.0, 0, False
        own_schema = {**action_schema, "type": "object"}
        own_schema["properties"] = {
            name: value
            for name, value in action_schema.get("properties", {}).items()
            if name != "metadata"
        }
        act = ToolSpec(name="step", description="act in the environment", parameters=own_schema)
        by_tool = settings.actions == "tool"
        self._tools: tuple[Tool, ...] = (Tool(act, self._act),) if by_tool else ()

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        return tuple(tool.spec for tool in self._tools)

    async def reset(self) -> None:
        opened = _open_websocket if self._settings.transport == "websocket" else _open_http
        self._session = await opened(self._settings, self.task.id, self._stack)
        found = await self._request("reset", self._reset_args)
        if self._settings.actions == "tool" and self._schema.get("title") in _MCP_ACTIONS:
            listed = await self._request("step", {"type": "list_tools"})
            self._tools = tuple(map(self._mcp_tool, listed["observation"]["tools"]))
        parts = [self._settings.instruction, _text(found["observation"])]
        content = "\n\n".join(filter(None, parts)) or self.task.messages[0].content
        self.task = replace(self.task, messages=(Message(role="user", content=content),))

    async def step(self, reply: Message) -> tuple[Message, ...]:
        if self._settings.actions == "tool":
            results = await execute_tool_calls(self._tools, reply)
            return () if self._done else results
        try:
            observation = await self._act(**self._parse_action(reply.content))
        except ToolError as error:
            observation = f"error: {error}"
        return () if self._done else (Message(role="user", content=observation),)

    async def score(self) -> Verdict:
        parts = {"steps": float(self._steps), "done": float(self._done)}
        return Verdict(reward=self._reward, parts=parts)

    async def close(self) -> None:
        await self._stack.aclose()

    def _parse_action(self, text: str) -> dict[str, Any]:
        """A reply as an action: a JSON object, or the value of the only required field."""
        text = text.strip().removeprefix("```json").strip("`").strip()
        try:
            found = json.loads(text)
        except ValueError:
            found = text
        if isinstance(found, dict):
            return found
        required = self._schema.get("required", [])
        if len(required) != 1:
            raise ToolError(f"the reply must be a JSON object with {', '.join(required)}")
        return {required[0]: found}

    def _mcp_tool(self, tool: Mapping[str, Any]) -> Tool:
        async def run(**arguments: Any) -> str:
            return await self._act(type="call_tool", tool_name=tool["name"], arguments=arguments)

        schema = tool.get("input_schema") or {"type": "object", "properties": {}}
        spec = ToolSpec(
            name=tool["name"], description=tool.get("description") or "", parameters=schema
        )
        return Tool(spec, run)

    async def _act(self, **action: Any) -> str:
        if self._done:
            raise ToolError("the episode is over")
        found = await self._request("step", action)
        self._steps += 1
        self._reward += float(found.get("reward") or 0.0)
        self._done = bool(found.get("done"))
        return _text(found["observation"])

    async def _request(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        async with asyncio.timeout(self._settings.step_timeout_s):
            return await self._session.request(kind, data)


def _text(observation: Mapping[str, Any]) -> str:
    """An observation as the model reads it: its text if it is one, else JSON.

    >>> _text({"board": "x.o", "done": False, "reward": 0.0}), _text({"a": 1, "b": [2]})
    ('x.o', '{"a": 1, "b": [2]}')
    """
    shown = {name: value for name, value in observation.items() if name not in _HIDDEN}
    if "tool_name" in shown:  # of a tool: its result alone
        shown = {"error": shown["error"]} if shown.get("error") else {"result": shown["result"]}
        result = shown.get("result")
        if isinstance(result, Mapping) and result.get("data") is not None:
            shown = {"result": result["data"]}
    (value, *others) = shown.values() or [""]
    is_text = isinstance(value, str) and not others
    return str(value) if is_text else json.dumps(shown, ensure_ascii=False)


# --- sessions -------------------------------------------------------------------------------------


class _Session(Protocol):
    async def request(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to "reset" or "step": observation, reward, done."""


@dataclass
class _WebSocketSession:
    socket: Any

    async def request(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        await self.socket.send(json.dumps({"type": kind, "data": data}))
        reply = json.loads(await self.socket.recv())
        if reply["type"] == "error":
            raise _error(str(reply["data"].get("code", "")), str(reply["data"].get("message")))
        found: dict[str, Any] = reply["data"]
        return found


async def _open_websocket(settings: OpenEnvSettings, _: str, stack: AsyncExitStack) -> _Session:
    from websockets.asyncio.client import connect

    url = f"ws{settings.url.removeprefix('http').rstrip('/')}/ws"
    socket = connect(url, max_size=_MAX_REPLY_BYTES, open_timeout=settings.step_timeout_s)
    return _WebSocketSession(await stack.enter_async_context(socket))


@dataclass
class _HttpSession:
    client: httpx.AsyncClient
    episode_id: str

    async def request(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        body = data if kind == "reset" else {"action": data}
        reply = await self.client.post(f"/{kind}", json={**body, "episode_id": self.episode_id})
        if reply.status_code == httpx.codes.UNPROCESSABLE_ENTITY:
            raise ToolError(reply.text)
        reply.raise_for_status()
        found: dict[str, Any] = reply.json()
        return found


async def _open_http(settings: OpenEnvSettings, task_id: str, stack: AsyncExitStack) -> _Session:
    client = httpx.AsyncClient(base_url=settings.url, timeout=settings.step_timeout_s)
    await stack.enter_async_context(client)
    return _HttpSession(client, f"{task_id}/{id(client):x}")


def _error(code: str, message: str) -> Exception:
    if code in _INVALID_ACTION:
        return ToolError(message)
    return RolloutFailed("world", "openenv", f"{code}: {message}")
