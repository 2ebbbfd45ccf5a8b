"""terminal: small tasks for a shell, made by chance, with hidden tests.

The player works in one sandbox. What it has written is then looked at in another, fresh one, so
that no process and no setting of the player's is there while it is graded.
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
TRIES = 2000
MIB = 1 << 20
CHECKS_PROGRAM = Path(__file__).with_name("sandboxed_checks.py")
ASK = "{}\n\nYou have a shell in {}. When you are done, answer without calling it."
SANDBOX = SandboxSettings(
    limits=ResourceLimits(
        memory_bytes=512 * MIB, disk_bytes=128 * MIB, max_processes=128, cpu_seconds=60
    )
)


class TerminalSettings(EnvSettings):
    seed: int = 0
    levels: tuple[int, ...] = (1, 2, 3)
    families: tuple[str, ...] = ()  # empty: all that this machine has the programs for
    sandbox: SandboxSettings = SANDBOX
    warm_sandboxes: int = Field(default=2, ge=0)  # sandboxes kept ready
    max_turns: int = Field(default=16, ge=1)
    timeout_s: float = Field(default=600.0, gt=0)
    command_timeout_s: float = Field(default=20.0, gt=0)
    verifier_timeout_s: float = Field(default=60.0, gt=0)
    max_output_bytes: int = Field(default=4096, ge=256)

    @field_validator("levels")
    @classmethod
    def _levels(cls, levels: tuple[int, ...]) -> tuple[int, ...]:
        if not levels or min(levels) < 1:
            raise ValueError("levels are numbers from 1 on")
        return levels

    @field_validator("families")
    @classmethod
    def _families(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in FAMILIES:
                raise ValueError(f"no family is called {name!r}; there are {', '.join(FAMILIES)}")
        return names

    def make_taskset(self) -> "TerminalTaskset":
        there = available_families()
        for name in self.families:
            if name not in there:
                raise EnvError(f"the family {name!r} needs the program {NEEDS[name]}")
        return TerminalTaskset(self, self.families or there)


class TerminalTaskset:
    name = NAME

    def __init__(self, settings: TerminalSettings, families: Sequence[str]) -> None:
        self.settings, self.families = settings, families
        self.pool = SandboxPool(settings.sandbox, warm=settings.warm_sandboxes)
        self._at = lru_cache(maxsize=256)(self._drawn)

    def size(self, split: Split) -> int | None:  # noqa: ARG002
        return None

    def generated_task(self, index: int, split: Split) -> TerminalTask:
        return self._at(index, split)

    def _drawn(self, index: int, split: Split) -> TerminalTask:
        level = self.settings.levels[index % len(self.settings.levels)]
        for attempt in range(TRIES):
            chance = Random(f"{self.settings.seed}/{index}/{attempt}")
            found = generate_task(chance, level, self.families)
            if assign_split(found.instruction) == split:
                return found
        raise EnvError(f"{TRIES} puzzles were drawn and none is for {split}")

    def task(self, index: int, split: Split = "train") -> Task:
        settings = self.settings
        ask = ASK.format(self.generated_task(index, split).instruction, settings.sandbox.workdir)
        return Task(
            id=f"{NAME}/{split}/{index}",
            env=NAME,
            messages=(Message(role="user", content=ask),),
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
        site = GeneratedTaskBackend(self.task_by_id(task), self.pool, self.settings)
        return TerminalEnv(task, site, command_s=self.settings.command_timeout_s)

    def solver(self, task: Task) -> Policy:
        return command_policy(self.task_by_id(task).solution)


def command_policy(commands: Sequence[str]) -> Policy:
    """Whoever runs these commands, one a turn, and is then done."""
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
    """A puzzle laid out in a sandbox; a `Site`."""

    def __init__(self, puzzle: TerminalTask, pool: SandboxPool, settings: TerminalSettings) -> None:
        self.puzzle, self.pool, self.settings = puzzle, pool, settings
        self._box: Sandbox | None = None

    async def start(self) -> ShellSession:
        self._box = await self.pool.take()
        await write_files(self._box, self.puzzle.files)
        if self.puzzle.setup:
            done = await self._box.exec(self.puzzle.setup)
            if not done.ok:
                raise RolloutFailed(
                    "world", "start", f"the set-up failed: {done.stderr.strip()[-200:]}"
                )
        return ShellSession(self._box)

    async def next_instruction(self) -> tuple[Message, ...]:
        return ()

    def timed_out(self) -> bool:
        return False

    async def score(self) -> Verdict:
        """A workspace that cannot be graded is worth nothing if one that nobody has touched can be:
        then it is the player's doing. Else there is no verdict."""
        try:
            return await self._graded()
        except (SandboxError, RolloutFailed) as error:
            await self._control()
            return Verdict(reward=0.0, note=f"it cannot be graded as it was left: {error}")

    async def _graded(self) -> Verdict:
        assert self._box is not None
        await self._box.kill()
        left = await self._box.snapshot()
        fresh = open_sandbox(self.settings.sandbox, left)
        try:
            await fresh.start()
            return await score_workspace(fresh, self.puzzle, self.settings.verifier_timeout_s)
        finally:
            await fresh.close()
            delete_snapshot(left)

    async def _control(self) -> None:
        try:
            async with self.pool.sandbox() as box:
                await write_files(box, self.puzzle.files)
                await score_workspace(box, self.puzzle, self.settings.verifier_timeout_s)
        except SandboxError as error:
            raise RolloutFailed("infrastructure", "grade", str(error)) from error

    async def close(self) -> None:
        if self._box is not None:
            await self._box.close()


async def score_workspace(box: Sandbox, puzzle: TerminalTask, seconds: float) -> Verdict:
    """All that was expected holds, or the attempt is worth nothing. Programs of the player's are
    run last and by themselves: what they print is all that is taken from them."""
    still = [replace(e, how="absent", path="/") if e.how == "runs" else e for e in puzzle.expects]
    done = await box.exec(
        [*box.python, "-I", "-c", CHECKS_PROGRAM.read_text(), "-"],
        stdin=checks_json(still).encode(),
        timeout_s=seconds,
    )
    if done.timed_out:
        raise RolloutFailed("grader", "grade", f"looking took over {seconds:g} s")
    if not done.ok:
        raise RolloutFailed("grader", "grade", f"the checker failed: {done.stderr.strip()[-300:]}")
    found = list(json.loads(done.stdout).values())
    parts = {}
    for number, (expect, holds) in enumerate(zip(puzzle.expects, found, strict=True), 1):
        name = f"{number} {expect.how} {expect.path}"
        parts[name] = float(await _runs(box, expect) if expect.how == "runs" else holds)
    missed = [name for name, value in parts.items() if not value]
    return Verdict(
        reward=float(not missed), parts=parts, note=f"not so: {missed[0]}" if missed else ""
    )


async def _runs(box: Sandbox, expect: StateCheck) -> bool:
    """Run with each input, the program prints what it should."""
    path = PurePosixPath(box.workspace, expect.path)
    cases: Any = expect.value
    for arguments, given, wanted in cases:
        done = await box.exec(
            [str(path), *arguments], cwd=str(path.parent), stdin=given.encode(), timeout_s=RUN_S
        )
        if not done.ok or trimmed(done.stdout) != trimmed(wanted):
            return False
    return True


async def write_files(box: Sandbox, files: Sequence[TaskFile]) -> None:
    """Write files with their modes, in one go."""
    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            path = Path(folder, file.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file.text)
            path.chmod(file.mode)
        await box.put(Path(folder), box.workspace)
