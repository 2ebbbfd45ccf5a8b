"""Runs in the Python of verifiers, beside Paddock's: its tasksets behind JSON lines.

An episode is driven by verifiers. Its model requests arrive at an OpenAI-compatible endpoint of
this process and are answered by Paddock's policy: `start` and `reply` return the next request, or
the end of the episode with its rewards. Imports nothing of Paddock.
"""

import asyncio
import json
import os
import sys
import time
import types
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

_MAX_LINE_BYTES = 64 << 20
_HARNESS = "paddock_chat"  # the module of the harness "chat"


class Episode:
    """One rollout: what verifiers asks and what the policy answers."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.replies: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.asking = False
        self.task: asyncio.Task[None] | None = None


class VerifiersBridge:
    def __init__(self) -> None:
        self._episodes: dict[int, Episode] = {}
        self._by_trace: dict[str, Episode] = {}
        self._tasks: list[Any] = []  # read so far
        self._closing = asyncio.Event()

    async def open(
        self, taskset: str, config: dict[str, Any], harness: str, max_turns: int
    ) -> dict[str, Any]:
        """Load the taskset and start its servers. Returns its size, None if it is infinite."""
        from verifiers.v1.utils.loaders import load_environment

        self._env = load_environment(_env_config(taskset, config, harness, max_turns))
        self._stream = iter(self._env.taskset)
        ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._server = asyncio.create_task(self._serve(ready))
        both: set[asyncio.Future[Any]] = {ready, self._server}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            self._server.result()
        self._base_url = f"http://127.0.0.1:{ready.result()}/v1"
        if self._env.taskset.bounded:
            self._tasks += list(self._stream)
            return {"size": len(self._tasks)}
        return {"size": None}

    async def _serve(self, ready: "asyncio.Future[int]") -> None:
        async with _endpoint(self._complete) as port, self._env.serving():
            ready.set_result(port)
            await self._closing.wait()

    def _task(self, row: int) -> Any:
        while len(self._tasks) <= row:
            self._tasks.append(next(self._stream))
        return self._tasks[row]

    async def task(self, row: int) -> dict[str, Any]:
        """The prompt of a task, as text for a person."""
        data = self._task(row).data
        return {"system": data.system_prompt or "", "prompt": data.prompt_text}

    async def start(self, episode: int, row: int) -> dict[str, Any]:
        here = self._episodes[episode] = Episode()
        here.task = asyncio.create_task(self._run(here, row))
        return await here.events.get()

    async def reply(self, episode: int, message: dict[str, Any]) -> dict[str, Any]:
        here = self._episodes[episode]
        here.replies.put_nowait(message)
        return await here.events.get()

    async def cancel(self, episode: int) -> None:
        here = self._episodes.pop(episode, None)
        if here is not None and here.task is not None:
            here.task.cancel()
            await asyncio.wait({here.task})
            here.events.put_nowait({"end": {"error": "cancelled"}})  # for a waiting call
            self._by_trace = {k: v for k, v in self._by_trace.items() if v is not here}

    async def _run(self, here: Episode, row: int) -> None:
        from verifiers.v1 import EvalClientConfig, ModelContext

        client = EvalClientConfig(base_url=self._base_url, api_key_var="PADDOCK_NO_KEY")
        context = ModelContext(model="policy", client=client)

        def on_trace(trace: Any) -> None:
            self._by_trace[trace.id] = here

        try:
            found = await self._env.run_episode(self._task(row), context, on_trace=on_trace)
            end = _summary(found)
        except Exception as error:
            end = {"error": f"{type(error).__name__}: {error}"}
        here.events.put_nowait({"end": end})

    async def _complete(self, body: dict[str, Any], trace_id: str) -> dict[str, Any]:
        """One request of an episode, answered by the policy."""
        here = self._by_trace[trace_id]
        if here.asking:
            raise ValueError("the episode asks for two replies at once")
        here.asking = True
        try:
            here.events.put_nowait({"messages": body["messages"], "tools": body.get("tools") or []})
            return await here.replies.get()
        finally:
            here.asking = False


def _env_config(taskset: str, config: dict[str, Any], harness: str, max_turns: int) -> Any:
    """The environment's config: every seat is played by the policy, on this machine."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.configs.env import EnvConfig
    from verifiers.v1.env import Env
    from verifiers.v1.utils.generic import concrete_type
    from verifiers.v1.utils.loaders import environment_class

    _define_chat_harness()
    env_class = environment_class(taskset, config.get("id", ""))
    config_class = concrete_type(env_class, EnvConfig, origin=Env) or EnvConfig
    data = {**config, "taskset": {"id": taskset, **config.get("taskset", {})}}
    for name, field in config_class.model_fields.items():
        if isinstance(field.default, AgentConfig):
            seat = {"runtime": {"type": "subprocess"}, "max_turns": max_turns, **data.get(name, {})}
            if field.default.harness is None and harness:
                seat.setdefault("harness", {"id": _HARNESS if harness == "chat" else harness})
            data[name] = seat
    return config_class.model_validate(data)


def _summary(episode: Any) -> dict[str, Any]:
    """The rewards of an episode, or what went wrong in it."""
    traces = episode.traces
    errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
    if not episode.ok:
        said = "; ".join(f"{error.type}: {error.message}" for error in errors)
        return {"error": said or "the episode did not complete"}
    if len(traces) != 1:
        return {"error": f"the episode has {len(traces)} agents; only one can be trained"}
    (trace,) = traces
    rewards = {name: reward.score for name, reward in trace.rewards.items() if reward}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return {"reward": trace.reward, "parts": {**metrics, **rewards}}


# --- the endpoint ---------------------------------------------------------------------------------


@asynccontextmanager
async def _endpoint(complete: Any) -> AsyncIterator[int]:
    """Serve chat completions on a free port of this machine."""
    from aiohttp import web

    async def post(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        message = await complete(body, request.headers["X-Session-ID"])
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        common = {"id": "paddock", "created": int(time.time()), "model": "policy"}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": finish}
            whole = {**common, "object": "chat.completion", "choices": [choice], "usage": usage}
            return web.json_response(whole)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        calls = [{**call, "index": i} for i, call in enumerate(message.get("tool_calls", ()))]
        delta = {**message, **({"tool_calls": calls} if calls else {})}
        for choice in ({"delta": delta}, {"delta": {}, "finish_reason": finish}):
            chunk = {
                **common,
                "object": "chat.completion.chunk",
                "choices": [{"index": 0} | choice],
            }
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        last = {**common, "object": "chat.completion.chunk", "choices": [], "usage": usage}
        await response.write(f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n".encode())
        return response

    app = web.Application(client_max_size=_MAX_LINE_BYTES)
    app.router.add_post("/v1/chat/completions", post)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


# --- the harness ----------------------------------------------------------------------------------


def _define_chat_harness() -> None:
    """The harness "chat": verifiers' chat loop without a process per rollout. Its only tools are
    those of the taskset."""
    import httpx
    from verifiers.v1 import Harness, HarnessConfig, ProgramResult
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

    class ChatHarnessConfig(HarnessConfig):
        pass

    class ChatHarness(Harness[ChatHarnessConfig]):
        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_MCP = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(self, *arguments: Any) -> ProgramResult:
            context, _trace, _runtime, endpoint, secret, mcp_urls, data = arguments
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += [message_to_wire(message) for message in prompt or ()]
            urls = {
                name: {"url": url, "timeout": self.config.tool_timeout}
                for name, url in mcp_urls.items()
            }
            async with AsyncExitStack() as stack:
                http = await stack.enter_async_context(httpx.AsyncClient(timeout=None))
                tools, dispatch, servers = await connect_mcp({"mcpServers": urls}, stack)
                while True:
                    body = {"model": context.model, "messages": messages}
                    response = await http.post(
                        f"{endpoint}/chat/completions",
                        json={**body, "tools": tools} if tools else body,
                        headers={"authorization": f"Bearer {secret}"},
                    )
                    if response.is_error:  # a limit was reached, or the policy failed
                        return ProgramResult(1, "", response.text)
                    message = response.json()["choices"][0]["message"]
                    messages.append(message)
                    if not message.get("tool_calls"):
                        return ProgramResult(0, "", "")
                    for call in message["tool_calls"]:
                        content = await _result(call["function"], dispatch, servers, call_mcp)
                        messages.append(
                            {"role": "tool", "tool_call_id": call["id"], "content": content}
                        )

    module = types.ModuleType(_HARNESS)
    module.ChatHarness = ChatHarness  # type: ignore[attr-defined]
    module.__all__ = ["ChatHarness"]  # type: ignore[attr-defined]
    sys.modules[_HARNESS] = module


async def _result(function: dict[str, Any], dispatch: Any, servers: Any, call_mcp: Any) -> Any:
    """The result of a tool call, or an error that the model reads."""
    if function["name"] not in dispatch:
        known = ", ".join(dispatch) or "none"
        return f"error: there is no tool {function['name']!r}; there are {known}"
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        return f"error: the arguments are not JSON: {error}"
    return await call_mcp(servers, dispatch, function["name"], arguments)


# --- the lines ------------------------------------------------------------------------------------


async def serve_lines(bridge: VerifiersBridge, results: int) -> None:
    """Answer calls until the input ends, any number at a time."""
    reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    running = set()

    async def answer(call: dict[str, Any]) -> None:
        found: dict[str, Any] = {"call": call["call"]}
        try:
            found["result"] = await getattr(bridge, call["method"])(**call["params"])
        except (Exception, SystemExit) as error:
            found["error"] = f"{type(error).__name__}: {error}"
        os.write(results, json.dumps(found, default=str).encode() + b"\n")

    async for line in reader:
        task = asyncio.create_task(answer(json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)


def main() -> None:
    results = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not be read as a result
    del sys.path[0]  # this folder, whose modules are not for verifiers
    asyncio.run(serve_lines(VerifiersBridge(), results))


if __name__ == "__main__":
    main()
