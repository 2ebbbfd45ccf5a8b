"""How Harbor tasks are run here."""

import re
from collections.abc import Mapping

from pydantic import Field

from paddock.config import BaseSettings
from paddock.envs.harbor.task import HarborTask
from paddock.envs.harbor.task_config import EnvironmentConfig, TaskError, VerifierView
from paddock.sandbox import ResourceLimits, SandboxSettings

MIB = 1 << 20
VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*?))?\}")
# Where things lie inside, by the contract between Harbor and a task.
TESTS, SOLUTION, LOGS = "/tests", "/solution", "/logs"
OWN = (TESTS, SOLUTION, LOGS, "/app", "/workspace")


class HarborSettings(BaseSettings):
    sandbox: SandboxSettings = SandboxSettings(
        limits=ResourceLimits(max_processes=1024, memory_bytes=2048 * MIB, disk_bytes=2048 * MIB)
    )
    # What the tests see of the agent's environment, unless a task says more or has a verifier's
    # environment of its own: files outside system folders, in a fresh sandbox; the system's changes
    # too; or the very sandbox with all that runs there, where a policy can forge its reward.
    verifier_sees: VerifierView = "files"
    allow_internet: bool = False  # whether a task that asks for a network gets this machine's
    allow_internet_in_build: bool = (
        True  # whether an environment may fetch things while it is built
    )
    skip_installs: bool = False  # leave out build steps that fetch packages
    offline_python: str = ""  # a Python environment with pytest, for tests that would fetch it
    fail_on_build_error: bool = True
    max_memory_bytes: int = Field(default=8 << 30, gt=0)  # whatever a task asks for
    max_disk_bytes: int = Field(default=4 << 30, gt=0)
    timeout_multiplier: float = Field(default=1.0, gt=0)  # of all of a task's own time limits
    env_vars: dict[str, str] = Field(default={})  # for ${NAME} in a task's env tables


def sandbox_settings(
    environment: EnvironmentConfig, task: HarborTask, settings: HarborSettings, image: str = ""
) -> SandboxSettings:
    """A sandbox as a task wants it, within what it may have."""
    asked, given = environment, settings.sandbox
    memory = (asked.memory_mb or 0) * MIB or given.limits.memory_bytes
    disk = (asked.storage_mb or 0) * MIB or given.limits.disk_bytes
    disk = min(disk, settings.max_disk_bytes)
    longest = max(
        max_step_timeout(task, settings), asked.build_timeout_sec * settings.timeout_multiplier
    )
    limits = given.limits.model_copy(
        update={
            "memory_bytes": min(memory, settings.max_memory_bytes),
            "disk_bytes": disk,
            "max_file_bytes": disk,
            "cpus": float(asked.cpus or given.limits.cpus),
            "cpu_seconds": int(longest) * 4 + 60,
        }
    )
    return given.model_copy(
        update={
            "limits": limits,
            "allow_syscalls": tuple(
                dict.fromkeys((*given.allow_syscalls, *task.config.paddock_metadata.allow))
            ),
            "allow_internet": settings.allow_internet
            and environment.effective_network_mode == "public",
            "writable_root": True,
            "writable_paths": tuple(dict.fromkeys((*OWN, *given.writable_paths))),
            "read_only_mounts": (
                *given.read_only_mounts,
                *([settings.offline_python] if settings.offline_python else []),
            ),
            "image": image,
        }
    )


def max_step_timeout(task: HarborTask, settings: HarborSettings) -> float:
    """The longest time that anybody has for one step of a task."""
    times = [task.agent_config(step).timeout_sec or 0.0 for step in task.steps]
    times += [task.verifier_config(step).timeout_sec for step in task.steps]
    return max(times) * settings.timeout_multiplier


def expand_variables(
    table: Mapping[str, str], variables: Mapping[str, str], where: str
) -> dict[str, str]:
    """Values with ${NAME} and ${NAME:-default} filled in.

    >>> expand_variables({"A": "${B:-x}"}, {}, "environment.env")
    {'A': 'x'}
    >>> expand_variables({"A": "${B}"}, {}, "environment.env")
    Traceback (most recent call last):
    paddock.envs.harbor.task_config.TaskError: environment.env.A: the variable 'B' is not given
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
