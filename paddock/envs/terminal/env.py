"""Environment of one rollout with a shell tool."""

from typing import Protocol

from paddock.envs.env import RolloutFailed
from paddock.envs.tools import Tool, ToolError, execute_tool_calls
from paddock.records import Message, Task, ToolSpec, Verdict
from paddock.sandbox import SandboxError, ShellResult, ShellSession

SHELL = ToolSpec(
    name="shell",
    description=(
        "Run a command in a bash shell. The shell stays: its folder, variables and background jobs"
        " are kept from one command to the next. There is no terminal and nobody to answer prompts."
    ),
    parameters={
        "type": "object",
        "properties": {
            "command": {"type": "string"},
            "timeout_s": {"type": "number", "description": "give up after so many seconds"},
        },
        "required": ["command"],
    },
)


class TerminalBackend(Protocol):
    """A sandbox in which a task is set up, and its verifier."""

    async def start(self) -> ShellSession:
        """Set up the task and return the shell of the policy."""

    async def next_instruction(self) -> tuple[Message, ...]:
        """The messages after the policy says that it is done: the next instruction, or none."""

    def timed_out(self) -> bool:
        """Whether the policy has used up its time; the rollout is still scored."""

    async def score(self) -> Verdict:
        """Run the verifier."""

    async def close(self) -> None: ...


class TerminalEnv:
    """An `Env` with a shell in a sandbox, until the policy replies without a tool call."""

    tools = (SHELL,)

    def __init__(self, task: Task, backend: TerminalBackend, *, command_timeout_s: float) -> None:
        self.task, self.backend, self.command_timeout_s = task, backend, command_timeout_s
        self._session: ShellSession | None = None
        self._broken = ""  # why no further command can run

    async def reset(self) -> None:
        try:
            self._session = await self.backend.start()
        except SandboxError as error:
            raise RolloutFailed("infrastructure", "start", str(error)) from error

    async def step(self, reply: Message) -> tuple[Message, ...]:
        if self.backend.timed_out():
            return ()
        if not reply.tool_calls:
            return await self.backend.next_instruction()
        return await execute_tool_calls([Tool(SHELL, self._run)], reply)

    async def _run(self, command: str, timeout_s: float | None = None) -> str:
        assert self._session is not None
        if timeout_s is not None and not timeout_s > 0:
            raise ToolError("shell: argument 'timeout_s' must be above zero")
        if self._broken:
            return self._broken
        seconds = min(timeout_s or self.command_timeout_s, self.command_timeout_s)
        try:
            return format_output(await self._session.run(command, seconds), seconds)
        except (SandboxError, TimeoutError, ValueError) as error:
            # A policy that breaks its sandbox or its shell is still scored: the backend finds out
            # whether the policy or the infrastructure caused it.
            self._broken = f"(the machine is broken: {error})"
            return self._broken

    async def score(self) -> Verdict:
        return await self.backend.score()

    async def close(self) -> None:
        await self.backend.close()


def format_output(result: ShellResult, seconds: float) -> str:
    """The tool result that the policy sees.

    >>> format_output(ShellResult(output="ls: no\\n", code=2, cwd="/"), 5)
    'ls: no\\n(exit code 2)'
    >>> format_output(ShellResult(output="", code=0, cwd="/"), 5)
    '(no output)'
    """
    notes = []
    if result.timed_out:
        notes.append(f"(over {seconds:g} s: it was killed)")
    elif result.code:
        notes.append(f"(exit code {result.code})")
    if result.ended:
        notes.append("(the shell ended; the next command gets a fresh one)")
    if not result.output and not notes:
        return "(no output)"
    gap = "" if not result.output or result.output.endswith("\n") or not notes else "\n"
    return result.output + gap + "\n".join(notes)
