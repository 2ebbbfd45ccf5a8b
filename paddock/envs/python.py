"""A Python interpreter that stays, as a tool: what one call defines, the next one sees."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated

from pydantic import Field

from paddock.config import BaseSettings
from paddock.envs.sandbox import Pool, PythonReply, PythonSession, SandboxSettings
from paddock.envs.talk import Lend
from paddock.envs.tools import Tool
from paddock.records import ToolSpec

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


class PythonSettings(BaseSettings):
    """The tool and the sandbox it runs in, one for each attempt."""

    seconds: Annotated[float, Field(gt=0)] = 30.0  # for one call
    warm: Annotated[int, Field(ge=0)] = 1  # sandboxes kept ready
    sandbox: SandboxSettings = SandboxSettings()


def lending_python(settings: PythonSettings) -> Lend:
    """The tool, in a sandbox of its own for each attempt."""
    pool = Pool(settings.sandbox, warm=settings.warm)

    @asynccontextmanager
    async def lend() -> AsyncIterator[Sequence[Tool]]:
        async with pool.box() as box:
            session = PythonSession(box)

            async def run(code: str) -> str:
                return _shown(await session.run(code, settings.seconds))

            yield (Tool(SPEC, run),)

    return lend


def _shown(reply: PythonReply) -> str:
    """
    >>> _shown(PythonReply(output="1\\n", error="NameError: x"))
    '1\\nNameError: x'
    """
    said = [text.rstrip("\n") for text in (reply.output, reply.error) if text]
    return "\n".join(said) or "(no output)"
