"""A Python interpreter that stays, as a tool: what one call defines, the next one sees."""

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
    """The tool and the sandbox it runs in, one for each attempt."""

    timeout_s: Annotated[float, Field(gt=0)] = 30.0  # for one call
    warm_sandboxes: Annotated[int, Field(ge=0)] = 1  # sandboxes kept ready
    sandbox: SandboxSettings = SandboxSettings()


def make_python_tool(settings: PythonToolSettings) -> ToolsFactory:
    """The tool, in a sandbox of its own for each attempt."""
    pool = SandboxPool(settings.sandbox, warm=settings.warm_sandboxes)

    @asynccontextmanager
    async def lend() -> AsyncIterator[Sequence[Tool]]:
        async with pool.sandbox() as box:
            session = PythonSession(box)

            async def run(code: str) -> str:
                return _shown(await session.run(code, settings.timeout_s))

            yield (Tool(SPEC, run),)

    return lend


def _shown(reply: PythonResult) -> str:
    """
    >>> _shown(PythonResult(output="1\\n", error="NameError: x"))
    '1\\nNameError: x'
    """
    said = [text.rstrip("\n") for text in (reply.output, reply.error) if text]
    return "\n".join(said) or "(no output)"
