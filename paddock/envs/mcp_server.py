"""MCP servers as an environment's tools, through the SDK `mcp`.

All connections live on the event loop of one thread: rollouts come and go on loops of their own, a
cancelled rollout cannot tear a connection that others share, and tools are listed before any loop
runs.
"""

import asyncio
import os
import shlex
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any, Self, TextIO, TypeVar

from pydantic import Field, model_validator

from paddock.config import BaseSettings
from paddock.envs.chat_env import ToolsFactory
from paddock.envs.env import RolloutFailed, describe_error
from paddock.envs.registry import EnvError
from paddock.envs.tools import Tool, ToolError
from paddock.records import ToolSpec

if TYPE_CHECKING:
    from mcp import Client

T = TypeVar("T")
_MAX_LOG_BYTES = 500
_CLOSE_S = 10.0


class McpServerSettings(BaseSettings):
    """A server that is started with a command, or one that runs at a URL (streamable HTTP)."""

    command: tuple[str, ...] = ()
    url: str = ""
    api_key_file: str = ""  # sent to the URL as a bearer token
    env: dict[str, str] = Field(default_factory=dict)  # of the command, beside PATH and HOME
    folder: str = ""  # in which the command runs; "": the current one
    tools: tuple[str, ...] = ()  # those to offer; (): all
    shared: bool = False  # one connection, and one process, for all rollouts instead of one each
    timeout_s: Annotated[float, Field(gt=0)] = 60.0  # per call
    start_timeout_s: Annotated[float, Field(gt=0)] = 60.0

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if bool(self.command) == bool(self.url):
            raise ValueError("set either 'command' or 'url'")
        return self


def open_mcp_servers(servers: Mapping[str, McpServerSettings]) -> ToolsFactory:
    """The tools of all servers. EnvError if a server cannot be reached or two tools have the same
    name."""
    if not find_spec("mcp"):
        raise EnvError("the MCP SDK is not installed: pip install 'paddock[mcp]'")
    opened = [McpServer(name, settings) for name, settings in servers.items()]
    offered: dict[str, str] = {}
    for server in opened:
        for spec in server.specs:
            if spec.name in offered:
                raise EnvError(
                    f"servers {offered[spec.name]!r} and {server.name!r} both have a tool "
                    f"{spec.name!r}: choose with 'tools'"
                )
            offered[spec.name] = server.name

    @asynccontextmanager
    async def open_tools() -> AsyncIterator[Sequence[Tool]]:
        async with AsyncExitStack() as stack:
            yield [
                tool
                for server in opened
                for tool in await stack.enter_async_context(server.open_tools())
            ]

    return ToolsFactory(tuple(spec for server in opened for spec in server.specs), open_tools)


@dataclass
class _Connection:
    """An open client. Its contexts are left in the task that entered them, as anyio demands."""

    client: "Client"
    task: "asyncio.Task[None]"
    log: TextIO  # what the server writes to stderr
    leave: asyncio.Event = field(default_factory=asyncio.Event)

    async def close(self) -> None:
        self.leave.set()
        await asyncio.wait({self.task}, timeout=_CLOSE_S)
        self.task.cancel()
        self.log.close()


class McpServer:
    """One server, and its tools as the settings choose them."""

    def __init__(self, name: str, settings: McpServerSettings) -> None:
        self.name, self._settings = name, settings
        self._shared: _Connection | None = None
        self._opening = asyncio.Lock()
        try:
            listed = asyncio.run_coroutine_threadsafe(self._list(), _loop()).result()
        except _ConnectError as error:
            raise EnvError(f"MCP server {name!r}: {error}") from None
        if missing := set(settings.tools) - {spec.name for spec in listed}:
            names = ", ".join(spec.name for spec in listed)
            raise EnvError(f"MCP server {name!r} has no tool {min(missing)!r}; it has {names}")
        self.specs = tuple(s for s in listed if not settings.tools or s.name in settings.tools)

    @asynccontextmanager
    async def open_tools(self) -> AsyncIterator[Sequence[Tool]]:
        """The tools for one rollout."""
        try:
            connection = await _on_loop(self._connect())
        except _ConnectError as error:
            raise RolloutFailed("world", f"MCP server {self.name}", str(error)) from None
        try:
            yield [self._tool(spec, connection) for spec in self.specs]
        finally:
            if not self._settings.shared:
                await _on_loop(connection.close())

    def _tool(self, spec: ToolSpec, connection: _Connection) -> Tool:
        async def run(**arguments: Any) -> str:
            return await _on_loop(self._call(connection, spec.name, arguments))

        return Tool(spec, run)

    # --- on the loop of the connections -----------------------------------------------------------

    async def _list(self) -> list[ToolSpec]:
        connection = await self._connect()
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                found, cursor = [], None
                while True:
                    page = await connection.client.list_tools(cursor=cursor)
                    found += page.tools
                    cursor = page.next_cursor
                    if not cursor:
                        break
        except TimeoutError:
            raise _ConnectError("it does not list its tools in time") from None
        except Exception as error:
            raise _ConnectError(describe_error(error)) from error
        finally:
            if not self._settings.shared:
                await connection.close()
        return [
            ToolSpec(name=t.name, description=t.description or "", parameters=t.input_schema)
            for t in found
        ]

    async def _connect(self) -> _Connection:
        if not self._settings.shared:
            return await _open(self._settings)
        async with self._opening:
            if self._shared is None:
                self._shared = await _open(self._settings)
            return self._shared

    async def _call(self, connection: _Connection, name: str, arguments: dict[str, Any]) -> str:
        from mcp import MCPError
        from mcp_types import INVALID_PARAMS

        seconds = self._settings.timeout_s
        try:
            async with asyncio.timeout(seconds):
                result = await connection.client.call_tool(name, arguments)
        except TimeoutError:
            raise RolloutFailed("time", name, f"no result within {seconds:g} s") from None
        except MCPError as error:
            if error.error.code == INVALID_PARAMS:
                raise ToolError(error.error.message) from None
            what = f"{describe_error(error)}{_tail(connection.log)}"
            if self._shared is connection:  # the next rollout connects again
                self._shared = None
                await connection.close()
            raise RolloutFailed("world", f"MCP server {self.name}", what) from error
        text = _text(result)
        if result.is_error:
            raise ToolError(text)
        return text


class _ConnectError(Exception):
    pass


async def _open(settings: McpServerSettings) -> _Connection:
    """Start or reach the server and greet it, in a task of its own."""
    log = TemporaryFile("w+")  # noqa: SIM115  closed with the connection
    ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
    leave = asyncio.Event()

    async def hold() -> None:
        async with AsyncExitStack() as stack:
            ready.set_result(await _enter_client(settings, log, stack))
            await leave.wait()

    task = asyncio.create_task(hold())
    both: set[asyncio.Future[Any]] = {task, ready}
    await asyncio.wait(both, timeout=settings.start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if ready.done():
        return _Connection(ready.result(), task, log, leave)
    reason = f"it did not answer within {settings.start_timeout_s:g} s"
    if task.done() and (error := task.exception()):
        reason = describe_error(_root(error))
    task.cancel()
    what = settings.url or shlex.join(settings.command)
    message = f"{what}: {reason}{_tail(log)}"
    log.close()
    raise _ConnectError(message)


async def _enter_client(
    settings: McpServerSettings, log: TextIO, stack: AsyncExitStack
) -> "Client":
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

    if settings.url:
        key = Path(settings.api_key_file).read_text().strip() if settings.api_key_file else ""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        http = await stack.enter_async_context(create_mcp_http_client(headers=headers))
        transport = streamable_http_client(settings.url, http_client=http)
    else:
        program, *rest = settings.command
        parameters = StdioServerParameters(
            command=program, args=rest, env=settings.env, cwd=settings.folder or None
        )
        transport = stdio_client(parameters, errlog=log)
    return await stack.enter_async_context(Client(transport))


def _root(error: BaseException) -> BaseException:
    """The first error of a group, as task groups raise them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _tail(log: TextIO) -> str:
    """The end of what the server wrote to stderr."""
    file = log.fileno()  # whose offset is the server's too
    start = max(0, os.fstat(file).st_size - _MAX_LOG_BYTES)
    text = os.pread(file, _MAX_LOG_BYTES, start).decode(errors="replace").strip()
    return f"; it wrote: {text}" if text else ""


def _text(result: Any) -> str:
    """A tool result as the model reads it."""
    parts = [
        block.text
        if block.type == "text"
        else f"[{block.type}{f' {mime}' if (mime := getattr(block, 'mime_type', '')) else ''}]"
        for block in result.content
    ]
    return "\n".join(parts) or "(no output)"


# --- the thread -----------------------------------------------------------------------------------


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, name="paddock-mcp", daemon=True).start()
    return loop


def _on_loop(work: Coroutine[Any, Any, T]) -> Awaitable[T]:
    """Run on the loop of the connections; awaited on the caller's."""
    return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, _loop()))
