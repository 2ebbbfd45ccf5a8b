"""Environment `terminal`: generated tasks for a shell, with hidden checks.

The policy works in one sandbox. Its files are checked in another, fresh one, so that none of its
processes and settings can affect the verifier.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from random import Random
from typing import Any

from pydantic import Field, field_validator

from paddock.envs.datasets import assign_split
from paddock.envs.env import Policy, RolloutFailed, Split, scripted_policy
from paddock.envs.registry import EnvError, EnvSettings
from paddock.envs.terminal.env import TerminalEnv
from paddock.envs.terminal.generate import FAMILIES, NEEDS, available_families, generate_task
from paddock.envs.terminal.sandboxed_checks import RUN_S, trimmed
from paddock.envs.terminal.task import StateCheck, TaskFile, TerminalTask, checks_json
from paddock.records import Budget, Message, Task, ToolCall, Verdict
from paddock.sandbox import (
    ResourceLimits,
    Sandbox,
    SandboxError,
    SandboxPool,
    SandboxSettings,
    ShellSession,
    delete_snapshot,
    open_sandbox,
)

NAME = "terminal"
MAX_DRAWS = 2000
MIB = 1 << 20
CHECKS_PROGRAM = Path(__file__).with_name("sandboxed_checks.py")
PROMPT = "{}\n\nYou have a shell in {}. When you are done, answer without calling it."
SANDBOX = SandboxSettings(
    limits=ResourceLimits(
        memory_bytes=512 * MIB, disk_bytes=128 * MIB, max_processes=128, cpu_seconds=60
    )
)


class TerminalSettings(EnvSettings):
    """Settings of env "terminal"."""

    seed: int = 0
    levels: tuple[int, ...] = (1, 2, 3)
    families: tuple[str, ...] = ()  # empty: all whose programs are installed
    sandbox: SandboxSettings = SANDBOX
    warm_sandboxes: int = Field(default=2, ge=0)  # started in advance
    max_turns: int = Field(default=16, ge=1)
    timeout_s: float = Field(default=600.0, gt=0)
    command_timeout_s: float = Field(default=20.0, gt=0)
    verifier_timeout_s: float = Field(default=60.0, gt=0)
    max_output_bytes: int = Field(default=4096, ge=256)

    @field_validator("levels")
    @classmethod
    def _levels(cls, levels: tuple[int, ...]) -> tuple[int, ...]:
        if not levels or min(levels) < 1:
            raise ValueError(f"levels must be numbers from 1, got {list(levels)}")
        return levels

    @field_validator("families")
    @classmethod
    def _families(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in FAMILIES:
                raise ValueError(f"families must be of {', '.join(FAMILIES)}, got {name!r}")
        return names

    def make_taskset(self) -> "TerminalTaskset":
        available = available_families()
        for name in self.families:
            if name not in available:
                raise EnvError(
                    f"family {name!r} needs the program {NEEDS[name]}, which is not installed"
                )
        return TerminalTaskset(self, self.families or available)


class TerminalTaskset:
    name = NAME

    def __init__(self, settings: TerminalSettings, families: Sequence[str]) -> None:
        self.settings, self.families = settings, families
        self.pool = SandboxPool(settings.sandbox, warm=settings.warm_sandboxes)
        self._cached_task = lru_cache(maxsize=256)(self._generate)

    def size(self, split: Split) -> int | None:  # noqa: ARG002
        return None

    def generated_task(self, index: int, split: Split) -> TerminalTask:
        return self._cached_task(index, split)

    def _generate(self, index: int, split: Split) -> TerminalTask:
        level = self.settings.levels[index % len(self.settings.levels)]
        for draw in range(MAX_DRAWS):
            rng = Random(f"{self.settings.seed}/{index}/{draw}")
            task = generate_task(rng, level, self.families)
            if assign_split(task.instruction) == split:
                return task
        raise EnvError(f"none of {MAX_DRAWS} generated tasks is in split {split!r}")

    def task(self, index: int, split: Split = "train") -> Task:
        settings = self.settings
        prompt = PROMPT.format(
            self.generated_task(index, split).instruction, settings.sandbox.workdir
        )
        return Task(
            id=f"{NAME}/{split}/{index}",
            env=NAME,
            messages=(Message(role="user", content=prompt),),
            budget=Budget(
                turns=settings.max_turns,
                seconds=settings.timeout_s,
                output_bytes=settings.max_output_bytes,
            ),
        )

    def task_by_id(self, task: Task) -> TerminalTask:
        _, split, index = task.id.split("/")
        return self.generated_task(int(index), "test" if split == "test" else "train")

    def make_env(self, task: Task) -> TerminalEnv:
        backend = GeneratedTaskBackend(self.task_by_id(task), self.pool, self.settings)
        return TerminalEnv(task, backend, command_timeout_s=self.settings.command_timeout_s)

    def solver(self, task: Task) -> Policy:
        return command_policy(self.task_by_id(task).solution)


def command_policy(commands: Sequence[str]) -> Policy:
    """A policy that runs these commands, one per turn, and then says that it is done."""
    replies = [
        Message(
            role="assistant",
            content="",
            tool_calls=(ToolCall(id=f"call_{i}", name="shell", arguments={"command": command}),),
        )
        for i, command in enumerate(commands)
    ]
    return scripted_policy(*replies, Message(role="assistant", content="Done."))


class GeneratedTaskBackend:
    """A `TerminalBackend` with a generated task."""

    def __init__(
        self, terminal_task: TerminalTask, pool: SandboxPool, settings: TerminalSettings
    ) -> None:
        self.terminal_task, self.pool, self.settings = terminal_task, pool, settings
        self._box: Sandbox | None = None

    async def start(self) -> ShellSession:
        self._box = await self.pool.take()
        await write_files(self._box, self.terminal_task.files)
        if self.terminal_task.setup:
            done = await self._box.exec(self.terminal_task.setup)
            if not done.ok:
                raise RolloutFailed(
                    "world", "start", f"the setup command failed: {done.stderr.strip()[-200:]}"
                )
        return ShellSession(self._box)

    async def next_instruction(self) -> tuple[Message, ...]:
        return ()

    def timed_out(self) -> bool:
        return False

    async def score(self) -> Verdict:
        """Check the workspace in a fresh sandbox.

        If that fails although an untouched workspace can be checked, the policy caused it and the
        reward is 0. Otherwise raises: there is no verdict.
        """
        try:
            return await self._score_copy()
        except (SandboxError, RolloutFailed) as error:
            await self._require_working_verifier()
            return Verdict(reward=0.0, note=f"it cannot be graded as it was left: {error}")

    async def _score_copy(self) -> Verdict:
        assert self._box is not None
        await self._box.kill()
        snapshot = await self._box.snapshot()
        fresh = open_sandbox(self.settings.sandbox, snapshot)
        try:
            await fresh.start()
            return await score_workspace(
                fresh, self.terminal_task, self.settings.verifier_timeout_s
            )
        finally:
            await fresh.close()
            delete_snapshot(snapshot)

    async def _require_working_verifier(self) -> None:
        try:
            async with self.pool.sandbox() as box:
                await write_files(box, self.terminal_task.files)
                await score_workspace(box, self.terminal_task, self.settings.verifier_timeout_s)
        except SandboxError as error:
            raise RolloutFailed("infrastructure", "grade", str(error)) from error

    async def close(self) -> None:
        if self._box is not None:
            await self._box.close()


async def score_workspace(box: Sandbox, terminal_task: TerminalTask, seconds: float) -> Verdict:
    """Reward 1 if all checks pass, otherwise 0. Raises RolloutFailed if the checker fails.

    Programs of the policy run last and as separate commands; only their output is used.
    """
    static = [
        replace(c, how="absent", path="/") if c.how == "runs" else c for c in terminal_task.checks
    ]
    done = await box.exec(
        [*box.python, "-I", "-c", CHECKS_PROGRAM.read_text(), "-"],
        stdin=checks_json(static).encode(),
        timeout_s=seconds,
    )
    if done.timed_out:
        raise RolloutFailed("grader", "grade", f"the checks exceeded {seconds:g} s")
    if not done.ok:
        raise RolloutFailed("grader", "grade", f"the checker failed: {done.stderr.strip()[-300:]}")
    results = list(json.loads(done.stdout).values())
    parts = {}
    for number, (check, passed) in enumerate(zip(terminal_task.checks, results, strict=True), 1):
        name = f"{number} {check.how} {check.path}"
        parts[name] = float(await _runs(box, check) if check.how == "runs" else passed)
    failed = [name for name, value in parts.items() if not value]
    return Verdict(
        reward=float(not failed), parts=parts, note=f"not so: {failed[0]}" if failed else ""
    )


async def _runs(box: Sandbox, check: StateCheck) -> bool:
    """Whether a program prints the expected output for each input."""
    path = PurePosixPath(box.workspace, check.path)
    cases: Any = check.value
    for arguments, stdin, expected in cases:
        done = await box.exec(
            [str(path), *arguments], cwd=str(path.parent), stdin=stdin.encode(), timeout_s=RUN_S
        )
        if not done.ok or trimmed(done.stdout) != trimmed(expected):
            return False
    return True


async def write_files(box: Sandbox, files: Sequence[TaskFile]) -> None:
    """Write files with their modes into the workspace, in one transfer."""
    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            path = Path(folder, file.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file.text)
            path.chmod(file.mode)
        await box.put(Path(folder), box.workspace)
