"""An attempt with a shell: what the player may call, and what it reads."""

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
    """Where an attempt happens: a sandbox with a task laid out in it."""

    async def start(self) -> ShellSession: ...

    async def next_instruction(self) -> tuple[Message, ...]:
        """The player says that it is done: what it is asked next, or nothing."""

    def timed_out(self) -> bool:
        """Whether the player has used up its own time; it is graded all the same."""

    async def score(self) -> Verdict: ...

    async def close(self) -> None: ...


class TerminalEnv:
    """An `Env`: a shell in a sandbox until the player answers without calling it."""

    tools = (SHELL,)

    def __init__(self, task: Task, site: TerminalBackend, *, command_s: float) -> None:
        self.task, self.site, self.command_s = task, site, command_s
        self._session: ShellSession | None = None
        self._broken = ""  # why no command can be run any more

    async def reset(self) -> None:
        try:
            self._session = await self.site.start()
        except SandboxError as error:
            raise RolloutFailed("infrastructure", "start", str(error)) from error

    async def step(self, reply: Message) -> tuple[Message, ...]:
        if self.site.timed_out():
            return ()
        if not reply.tool_calls:
            return await self.site.next_instruction()
        return await execute_tool_calls([Tool(SHELL, self._run)], reply)

    async def _run(self, command: str, timeout_s: float | None = None) -> str:
        assert self._session is not None
        if timeout_s is not None and not timeout_s > 0:
            raise ToolError("shell: argument 'timeout_s' must be above zero")
        if self._broken:
            return self._broken
        seconds = min(timeout_s or self.command_s, self.command_s)
        try:
            return format_output(await self._session.run(command, seconds), seconds)
        except (SandboxError, TimeoutError, ValueError) as error:
            # Whoever breaks its own machine, or the shell's answers, is graded all the same: the
            # site finds out whether it was the player or ours.
            self._broken = f"(the machine is broken: {error})"
            return self._broken

    async def score(self) -> Verdict:
        return await self.site.score()

    async def close(self) -> None:
        await self.site.close()


def format_output(reply: ShellResult, seconds: float) -> str:
    """What the player reads.

    >>> format_output(ShellResult(output="ls: no\\n", code=2, cwd="/"), 5)
    'ls: no\\n(exit code 2)'
    >>> format_output(ShellResult(output="", code=0, cwd="/"), 5)
    '(no output)'
    """
    notes = []
    if reply.timed_out:
        notes.append(f"(over {seconds:g} s: it was killed)")
    elif reply.code:
        notes.append(f"(exit code {reply.code})")
    if reply.ended:
        notes.append("(the shell ended; the next command gets a fresh one)")
    if not reply.output and not notes:
        return "(no output)"
    gap = "" if not reply.output or reply.output.endswith("\n") or not notes else "\n"
    return reply.output + gap + "\n".join(notes)
