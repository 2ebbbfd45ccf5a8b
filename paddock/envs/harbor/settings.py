"""How Harbor tasks are run here."""

import re
from collections.abc import Mapping

from pydantic import Field

from paddock.config import BaseSettings
from paddock.envs.harbor.config import Environment, Seen, TaskError
from paddock.envs.harbor.folder import HarborTask
from paddock.envs.sandbox import Limits, SandboxSettings

MIB = 1 << 20
VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*?))?\}")
# Where things lie inside, by the contract between Harbor and a task.
TESTS, SOLUTION, LOGS = "/tests", "/solution", "/logs"
OWN = (TESTS, SOLUTION, LOGS, "/app", "/workspace")


class HarborSettings(BaseSettings):
    sandbox: SandboxSettings = SandboxSettings(
        limits=Limits(processes=1024, memory_bytes=2048 * MIB, disk_bytes=2048 * MIB)
    )
    # What the tests see of the agent's environment, unless a task says more or has a verifier's
    # environment of its own: files outside system folders, in a fresh sandbox; the system's changes
    # too; or the very sandbox with all that runs there, where a policy can forge its reward.
    verifier_sees: Seen = "files"
    network: bool = False  # whether a task that asks for a network gets this machine's
    build_network: bool = True  # whether an environment may fetch things while it is built
    skip_installs: bool = False  # leave out build steps that fetch packages
    stand_ins: str = ""  # a Python environment with pytest, for tests that would fetch it
    stop_at_failed_build_steps: bool = True
    most_memory_bytes: int = Field(default=8 << 30, gt=0)  # whatever a task asks for
    most_disk_bytes: int = Field(default=4 << 30, gt=0)
    time_factor: float = Field(default=1.0, gt=0)  # of all of a task's own time limits
    variables: dict[str, str] = Field(default={})  # for ${NAME} in a task's env tables


def box_settings(
    environment: Environment, task: HarborTask, settings: HarborSettings, image: str = ""
) -> SandboxSettings:
    """A sandbox as a task wants it, within what it may have."""
    asked, given = environment, settings.sandbox
    memory = (asked.memory_mb or 0) * MIB or given.limits.memory_bytes
    disk = (asked.storage_mb or 0) * MIB or given.limits.disk_bytes
    disk = min(disk, settings.most_disk_bytes)
    longest = max(seconds_of(task, settings), asked.build_timeout_sec * settings.time_factor)
    limits = given.limits.model_copy(
        update={
            "memory_bytes": min(memory, settings.most_memory_bytes),
            "disk_bytes": disk,
            "file_bytes": disk,
            "cpus": float(asked.cpus or given.limits.cpus),
            "cpu_seconds": int(longest) * 4 + 60,
        }
    )
    return given.model_copy(
        update={
            "limits": limits,
            "allow": tuple(dict.fromkeys((*given.allow, *task.config.needs.allow))),
            "network": settings.network and environment.network == "public",
            "writable_system": True,
            "writable": tuple(dict.fromkeys((*OWN, *given.writable))),
            "readable": (*given.readable, *([settings.stand_ins] if settings.stand_ins else [])),
            "image": image,
        }
    )


def seconds_of(task: HarborTask, settings: HarborSettings) -> float:
    """The longest time that anybody has for one step of a task."""
    times = [task.agent(step).timeout_sec or 0.0 for step in task.steps]
    times += [task.verifier(step).timeout_sec for step in task.steps]
    return max(times) * settings.time_factor


def filled(table: Mapping[str, str], variables: Mapping[str, str], where: str) -> dict[str, str]:
    """Values with ${NAME} and ${NAME:-default} filled in.

    >>> filled({"A": "${B:-x}"}, {}, "environment.env")
    {'A': 'x'}
    >>> filled({"A": "${B}"}, {}, "environment.env")
    Traceback (most recent call last):
    paddock.envs.harbor.config.TaskError: environment.env.A: the variable 'B' is not given
    """
    return {key: _filled(value, variables, f"{where}.{key}") for key, value in table.items()}


def _filled(text: str, variables: Mapping[str, str], where: str) -> str:
    whole = VARIABLE.fullmatch(text)
    if whole is None:
        return text
    name, otherwise = whole[1], whole[2]
    if name not in variables and otherwise is None:
        raise TaskError(f"{where}: the variable {name!r} is not given")
    return variables.get(name, otherwise or "")
