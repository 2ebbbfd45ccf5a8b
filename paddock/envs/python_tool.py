"""A persistent Python interpreter as a tool: definitions stay from call to call."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated

from pydantic import Field

from paddock.config import BaseSettings
from paddock.envs.chat_env import ToolsFactory
from paddock.envs.tools import Tool
from paddock.records import ToolSpec
from paddock.sandbox import PythonResult, PythonSession, SandboxPool, SandboxSettings

SPEC = ToolSpec(
    name="python",
    description=(
        "Run Python. Names stay defined from call to call. You see what is printed, and the value "
        "of a last expression."
    ),
    parameters={
        "type": "object",
        "properties": {"code": {"type": "string"}},
        "required": ["code"],
    },
)


class PythonToolSettings(BaseSettings):
    """The tool and its sandbox, one per rollout."""

    timeout_s: Annotated[float, Field(gt=0)] = 30.0  # per call
    warm_sandboxes: Annotated[int, Field(ge=0)] = 1  # sandboxes kept ready
    sandbox: SandboxSettings = SandboxSettings()


def make_python_tool(settings: PythonToolSettings) -> ToolsFactory:
    """Factory of the tool, with a new sandbox for each rollout."""
    pool = SandboxPool(settings.sandbox, warm=settings.warm_sandboxes)

    @asynccontextmanager
    async def open_tools() -> AsyncIterator[Sequence[Tool]]:
        async with pool.sandbox() as box:
            session = PythonSession(box)

            async def run(code: str) -> str:
                return _format_result(await session.run(code, settings.timeout_s))

            yield (Tool(SPEC, run),)

    return ToolsFactory((SPEC,), open_tools)


def _format_result(reply: PythonResult) -> str:
    """Output and error of a call as the model reads them.

    >>> _format_result(PythonResult(output="1\\n", error="NameError: x"))
    '1\\nNameError: x'
    """
    parts = [text.rstrip("\n") for text in (reply.output, reply.error) if text]
    return "\n".join(parts) or "(no output)"
