"""An agent as a process: one for every rollout, ended with it."""

import asyncio
import json
import os
import shlex
import signal
import sys
import tempfile
from asyncio import subprocess
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from paddock.launch.errors import UserError

if TYPE_CHECKING:
    from paddock.rollout import agents

KILL_GRACE_S = 2.0  # of a process that was told to end
STDERR_LINES = 20


class ProcessAgent:
    """Runs a command for every rollout; the agent's key and its task are in its environment."""

    def __init__(self, command: str) -> None:
        self.words = shlex.split(command)
        if not self.words:
            raise UserError("an agent's 'command' must not be empty")

    async def run_agent(self, endpoint: "agents.AgentEndpoint") -> None:
        from paddock.envs import RolloutFailed

        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(endpoint.task, file)
            file.flush()
            try:
                process = await asyncio.create_subprocess_exec(
                    *self.words,
                    env=os.environ | agent_environment(endpoint, file.name),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    start_new_session=True,  # its children end with it
                )
            except OSError as error:
                raise RolloutFailed("world", "agent", f"{self.words[0]}: {error}") from error
            reading = asyncio.ensure_future(_last_lines(process))
            try:
                code = await process.wait()
            finally:
                await _end(process)
                last = await reading
        if killed := _signal_of(code):
            raise RolloutFailed("infrastructure", "agent", f"it was killed by {killed}: {last}")
        if code:
            raise RolloutFailed("world", "agent", f"it exited with code {code}: {last}")


def agent_environment(endpoint: "agents.AgentEndpoint", task_file: str) -> dict[str, str]:
    """What stock clients read, and where the task is."""
    told = endpoint.as_json()
    found = {  # commands find the programs of this environment first
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "OPENAI_BASE_URL": f"{endpoint.base_url}/v1",
        "OPENAI_API_KEY": told["api_key"],
        "ANTHROPIC_BASE_URL": endpoint.base_url,
        "ANTHROPIC_API_KEY": told["api_key"],
        "PADDOCK_TASK": task_file,
    }
    if "verdict_key" in told:
        found |= {
            "PADDOCK_VERDICT_URL": told["verdict_url"],
            "PADDOCK_VERDICT_KEY": told["verdict_key"],
        }
    return found


async def _last_lines(process: subprocess.Process) -> str:
    """The end of what the process writes to stderr until it closes it."""
    assert process.stderr is not None
    lines: deque[bytes] = deque(maxlen=STDERR_LINES)
    while part := await process.stderr.read(1 << 16):
        lines.extend(part.splitlines())
    return b"\n".join(lines).decode(errors="replace")[-500:]


async def _end(process: subprocess.Process) -> None:
    """End the process group, whatever of it is left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(KILL_GRACE_S):
                await process.wait()
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _signal_of(code: int) -> str:
    """The signal that ended a process, also one that a shell reports; empty if none did.

    >>> _signal_of(-9), _signal_of(137), _signal_of(1)
    ('SIGKILL', 'SIGKILL', '')
    """
    number = -code if code < 0 else code - 128
    return signal.Signals(number).name if number in set(signal.Signals) else ""
