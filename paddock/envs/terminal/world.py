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

from paddock.envs.problems import split_of
from paddock.envs.registry import WorldError, WorldSettings
from paddock.envs.sandbox import (
    Limits,
    Pool,
    Sandbox,
    SandboxError,
    SandboxSettings,
    ShellSession,
    forget,
    open_sandbox,
)
from paddock.envs.terminal.check_inside import RUN_S, trimmed
from paddock.envs.terminal.env import TerminalEnv
from paddock.envs.terminal.generate import FAMILIES, NEEDS, available, puzzle
from paddock.envs.terminal.puzzle import Expect, File, Puzzle, checks
from paddock.envs.world import Policy, Split, Stopped, scripted
from paddock.records import Budget, Message, Task, ToolCall, Verdict

NAME = "terminal"
TRIES = 2000
MIB = 1 << 20
CHECK = Path(__file__).with_name("check_inside.py")
ASK = "{}\n\nYou have a shell in {}. When you are done, answer without calling it."
SANDBOX = SandboxSettings(
    limits=Limits(memory_bytes=512 * MIB, disk_bytes=128 * MIB, processes=128, cpu_seconds=60)
)


class TerminalSettings(WorldSettings):
    seed: int = 0
    levels: tuple[int, ...] = (1, 2, 3)
    families: tuple[str, ...] = ()  # empty: all that this machine has the programs for
    sandbox: SandboxSettings = SANDBOX
    warm: int = Field(default=2, ge=0)  # sandboxes kept ready
    turns: int = Field(default=16, ge=1)
    seconds: float = Field(default=600.0, gt=0)
    command_s: float = Field(default=20.0, gt=0)
    grade_s: float = Field(default=60.0, gt=0)
    output_bytes: int = Field(default=4096, ge=256)

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

    def world(self) -> "TerminalWorld":
        there = available()
        for name in self.families:
            if name not in there:
                raise WorldError(f"the family {name!r} needs the program {NEEDS[name]}")
        return TerminalWorld(self, self.families or there)


class TerminalWorld:
    name = NAME

    def __init__(self, settings: TerminalSettings, families: Sequence[str]) -> None:
        self.settings, self.families = settings, families
        self.pool = Pool(settings.sandbox, warm=settings.warm)
        self._at = lru_cache(maxsize=256)(self._drawn)

    def size(self, split: Split) -> int | None:  # noqa: ARG002
        return None

    def puzzle(self, index: int, split: Split) -> Puzzle:
        return self._at(index, split)

    def _drawn(self, index: int, split: Split) -> Puzzle:
        level = self.settings.levels[index % len(self.settings.levels)]
        for attempt in range(TRIES):
            chance = Random(f"{self.settings.seed}/{index}/{attempt}")
            found = puzzle(chance, level, self.families)
            if split_of(found.ask) == split:
                return found
        raise WorldError(f"{TRIES} puzzles were drawn and none is for {split}")

    def task(self, index: int, split: Split = "train") -> Task:
        settings = self.settings
        ask = ASK.format(self.puzzle(index, split).ask, settings.sandbox.workspace)
        return Task(
            id=f"{NAME}/{split}/{index}",
            env=NAME,
            messages=(Message(role="user", content=ask),),
            budget=Budget(
                turns=settings.turns,
                seconds=settings.seconds,
                output_bytes=settings.output_bytes,
            ),
        )

    def of(self, task: Task) -> Puzzle:
        _, split, index = task.id.split("/")
        return self.puzzle(int(index), "test" if split == "test" else "train")

    def open(self, task: Task) -> TerminalEnv:
        site = PuzzleSite(self.of(task), self.pool, self.settings)
        return TerminalEnv(task, site, command_s=self.settings.command_s)

    def solver(self, task: Task) -> Policy:
        return playing(self.of(task).solution)


def playing(commands: Sequence[str]) -> Policy:
    """Whoever runs these commands, one a turn, and is then done."""
    replies = [
        Message(
            role="assistant",
            content="",
            tool_calls=(ToolCall(id=f"call_{i}", name="shell", arguments={"command": command}),),
        )
        for i, command in enumerate(commands)
    ]
    return scripted(*replies, Message(role="assistant", content="Done."))


class PuzzleSite:
    """A puzzle laid out in a sandbox; a `Site`."""

    def __init__(self, puzzle: Puzzle, pool: Pool, settings: TerminalSettings) -> None:
        self.puzzle, self.pool, self.settings = puzzle, pool, settings
        self._box: Sandbox | None = None

    async def start(self) -> ShellSession:
        self._box = await self.pool.take()
        await lay(self._box, self.puzzle.files)
        if self.puzzle.setup:
            done = await self._box.exec(self.puzzle.setup)
            if not done.ok:
                raise Stopped("world", "start", f"the set-up failed: {done.stderr.strip()[-200:]}")
        return ShellSession(self._box)

    async def next(self) -> tuple[Message, ...]:
        return ()

    def time_is_over(self) -> bool:
        return False

    async def grade(self) -> Verdict:
        """A workspace that cannot be graded is worth nothing if one that nobody has touched can be:
        then it is the player's doing. Else there is no verdict."""
        try:
            return await self._graded()
        except (SandboxError, Stopped) as error:
            await self._control()
            return Verdict(reward=0.0, note=f"it cannot be graded as it was left: {error}")

    async def _graded(self) -> Verdict:
        assert self._box is not None
        await self._box.kill()
        left = await self._box.snapshot()
        fresh = open_sandbox(self.settings.sandbox, left)
        try:
            await fresh.start()
            return await graded(fresh, self.puzzle, self.settings.grade_s)
        finally:
            await fresh.close()
            forget(left)

    async def _control(self) -> None:
        try:
            async with self.pool.box() as box:
                await lay(box, self.puzzle.files)
                await graded(box, self.puzzle, self.settings.grade_s)
        except SandboxError as error:
            raise Stopped("infrastructure", "grade", str(error)) from error

    async def close(self) -> None:
        if self._box is not None:
            await self._box.close()


async def graded(box: Sandbox, puzzle: Puzzle, seconds: float) -> Verdict:
    """All that was expected holds, or the attempt is worth nothing. Programs of the player's are
    run last and by themselves: what they print is all that is taken from them."""
    still = [replace(e, how="absent", path="/") if e.how == "runs" else e for e in puzzle.expects]
    done = await box.exec(
        [*box.python, "-I", "-c", CHECK.read_text(), "-"],
        stdin=checks(still).encode(),
        timeout_s=seconds,
    )
    if done.timed_out:
        raise Stopped("grader", "grade", f"looking took over {seconds:g} s")
    if not done.ok:
        raise Stopped("grader", "grade", f"the checker failed: {done.stderr.strip()[-300:]}")
    found = list(json.loads(done.stdout).values())
    parts = {}
    for number, (expect, holds) in enumerate(zip(puzzle.expects, found, strict=True), 1):
        name = f"{number} {expect.how} {expect.path}"
        parts[name] = float(await _runs(box, expect) if expect.how == "runs" else holds)
    missed = [name for name, value in parts.items() if not value]
    return Verdict(
        reward=float(not missed), parts=parts, note=f"not so: {missed[0]}" if missed else ""
    )


async def _runs(box: Sandbox, expect: Expect) -> bool:
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


async def lay(box: Sandbox, files: Sequence[File]) -> None:
    """Write files with their modes, in one go."""
    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            path = Path(folder, file.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file.text)
            path.chmod(file.mode)
        await box.put(Path(folder), box.workspace)
