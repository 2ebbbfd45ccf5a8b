"""Settings of Harbor trials, and the sandbox settings of a task."""

import re
from collections.abc import Mapping

from pydantic import Field

from paddock.config import BaseSettings
from paddock.envs.harbor.task import HarborTask
from paddock.envs.harbor.task_config import EnvironmentConfig, TaskError, VerifierView
from paddock.sandbox import ResourceLimits, SandboxSettings

MIB = 1 << 20
VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*?))?\}")
# Paths inside, by Harbor's contract.
TESTS, SOLUTION, LOGS = "/tests", "/solution", "/logs"
TASK_PATHS = (TESTS, SOLUTION, LOGS, "/app", "/workspace")


class HarborSettings(BaseSettings):
    """How Harbor tasks are run."""

    sandbox: SandboxSettings = SandboxSettings(
        limits=ResourceLimits(max_processes=1024, memory_bytes=2048 * MIB, disk_bytes=2048 * MIB)
    )
    # What the verifier sees of the agent's environment, unless the task needs more or has its own
    # verifier environment. "files": files outside system directories, in a fresh sandbox; "system":
    # changes of the system too; "processes": the agent's sandbox itself, where a policy can forge
    # its reward.
    verifier_sees: VerifierView = "files"
    allow_internet: bool = False  # for tasks with network_mode = "public"
    allow_internet_in_build: bool = True
    skip_installs: bool = False  # skip build instructions that download packages
    offline_python: str = ""  # Python environment with pytest, for tests that would install it
    fail_on_build_error: bool = True
    max_memory_bytes: int = Field(default=8 << 30, gt=0)  # upper limits of what a task requests
    max_disk_bytes: int = Field(default=4 << 30, gt=0)
    timeout_multiplier: float = Field(default=1.0, gt=0)  # of all timeouts of a task
    env_vars: dict[str, str] = Field(default={})  # for ${NAME} in a task's env tables


def sandbox_settings(
    environment: EnvironmentConfig, task: HarborTask, settings: HarborSettings, image: str = ""
) -> SandboxSettings:
    """Sandbox settings that a task requests, within the limits of the settings."""
    base = settings.sandbox
    memory = (environment.memory_mb or 0) * MIB or base.limits.memory_bytes
    disk = (environment.storage_mb or 0) * MIB or base.limits.disk_bytes
    disk = min(disk, settings.max_disk_bytes)
    longest = max(
        max_step_timeout(task, settings),
        environment.build_timeout_sec * settings.timeout_multiplier,
    )
    limits = base.limits.model_copy(
        update={
            "memory_bytes": min(memory, settings.max_memory_bytes),
            "disk_bytes": disk,
            "max_file_bytes": disk,
            "cpus": float(environment.cpus or base.limits.cpus),
            "cpu_seconds": int(longest) * 4 + 60,
        }
    )
    return base.model_copy(
        update={
            "limits": limits,
            "allow_syscalls": tuple(
                dict.fromkeys((*base.allow_syscalls, *task.config.paddock_metadata.allow))
            ),
            "allow_internet": settings.allow_internet
            and environment.effective_network_mode == "public",
            "writable_root": True,
            "writable_paths": tuple(dict.fromkeys((*TASK_PATHS, *base.writable_paths))),
            "read_only_mounts": (
                *base.read_only_mounts,
                *([settings.offline_python] if settings.offline_python else []),
            ),
            "image": image,
        }
    )


def max_step_timeout(task: HarborTask, settings: HarborSettings) -> float:
    """The longest timeout of an agent or verifier in any step."""
    times = [task.agent_config(step).timeout_sec or 0.0 for step in task.steps]
    times += [task.verifier_config(step).timeout_sec for step in task.steps]
    return max(times) * settings.timeout_multiplier


def expand_variables(
    table: Mapping[str, str], variables: Mapping[str, str], where: str
) -> dict[str, str]:
    """The values with ${NAME} and ${NAME:-default} expanded. Raises TaskError if one is unset.

    >>> expand_variables({"A": "${B:-x}"}, {}, "environment.env")
    {'A': 'x'}
    >>> expand_variables({"A": "${B}"}, {}, "environment.env")
    Traceback (most recent call last):
    paddock.envs.harbor.task_config.TaskError: environment.env.A: variable 'B' is not set
    """
    return {key: _expand(value, variables, f"{where}.{key}") for key, value in table.items()}


def _expand(text: str, variables: Mapping[str, str], where: str) -> str:
    match = VARIABLE.fullmatch(text)
    if match is None:
        return text
    name, default = match[1], match[2]
    if name not in variables and default is None:
        raise TaskError(f"{where}: variable {name!r} is not set")
    return variables.get(name, default or "")
