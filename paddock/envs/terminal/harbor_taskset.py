"""Environment `harbor`: a directory of tasks in the format of Harbor or terminal-bench 1."""

import base64
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Literal

from pydantic import Field

from paddock.config import RequiredFile
from paddock.envs.datasets import assign_split
from paddock.envs.env import Policy, RolloutFailed, Split, scripted_policy
from paddock.envs.harbor import (
    SOLUTION,
    HarborSettings,
    HarborTask,
    TaskStep,
    Trial,
    find_task_folders,
    read_task,
    scalar_reward,
)
from paddock.envs.registry import EnvError, EnvSettings
from paddock.envs.terminal.env import TerminalEnv
from paddock.records import Budget, Message, Task, ToolCall, Verdict
from paddock.sandbox import SandboxError, ShellSession, pack

NAME = "harbor"
SLACK_S = 120.0  # for sandboxes to start and stop
_verifier_works: dict[tuple[str, str], bool] = {}  # by task folder and step
PROMPT = "{}\n\nYou have a shell in {}. When you are done, answer without calling it."


class HarborEnvSettings(EnvSettings):
    """Settings of env "harbor"."""

    path: str  # a task folder, or a directory of task folders
    split: Literal["train", "test", "by-name"] = "by-name"
    harbor: HarborSettings = HarborSettings()
    max_turns: int = Field(default=64, ge=1)
    command_timeout_s: float = Field(default=60.0, gt=0)
    agent_timeout_s: float = Field(default=600.0, gt=0)  # where a task sets no timeout
    max_output_bytes: int = Field(default=8192, ge=256)

    def make_taskset(self) -> "HarborTaskset":
        return HarborTaskset(self)

    def data_files(self) -> tuple[RequiredFile, ...]:
        contains = (
            "a task folder or a folder of them: instruction.md, task.toml, environment/Dockerfile, "
            "tests/test.sh as in Harbor, or task.yaml as in terminal-bench 1"
        )
        return (RequiredFile(path=self.path, contains=contains),)


class HarborTaskset:
    name = NAME

    def __init__(self, settings: HarborEnvSettings) -> None:
        self.settings = settings

    @cached_property
    def tasks(self) -> dict[str, HarborTask]:
        folders = find_task_folders(Path(self.settings.path).expanduser())
        return {folder.name: read_task(folder) for folder in folders}

    def task_names(self, split: Split) -> list[str]:
        setting = self.settings.split
        return [
            name
            for name in self.tasks
            if (assign_split(name) if setting == "by-name" else setting) == split
        ]

    def size(self, split: Split) -> int | None:
        return len(self.task_names(split))

    def task(self, index: int, split: Split = "train") -> Task:
        names = self.task_names(split)
        if not names:
            raise EnvError(
                f"{self.settings.path}: none of its {len(self.tasks)} tasks is in split {split!r}; "
                f"set split = {split!r} to use them all"
            )
        epoch, position = divmod(index, len(names))
        if epoch:
            Random(f"{epoch}").shuffle(names)
        return self._task(names[position])

    def _task(self, name: str) -> Task:
        task, settings = self.tasks[name], self.settings
        step = task.steps[0]
        factor = settings.harbor.timeout_multiplier
        seconds = task.config.environment.build_timeout_sec * factor + SLACK_S
        for each in task.steps:
            agent = task.agent_config(each).timeout_sec or settings.agent_timeout_s
            seconds += (agent + task.verifier_config(each).timeout_sec) * factor
        where = task.config.environment.workdir or "its folder"
        prompt = Message(role="user", content=PROMPT.format(step.instruction.strip(), where))
        budget = Budget(
            turns=settings.max_turns, seconds=seconds, output_bytes=settings.max_output_bytes
        )
        return Task(id=f"{NAME}/{name}", env=NAME, messages=(prompt,), budget=budget)

    def make_env(self, task: Task) -> TerminalEnv:
        found = self.tasks[task.id.removeprefix(f"{NAME}/")]
        return TerminalEnv(
            task,
            HarborTrialBackend(found, self.settings),
            command_timeout_s=self.settings.command_timeout_s,
        )

    def solver(self, task: Task) -> Policy:
        """A policy that runs the task's reference solution in the shell."""
        found = self.tasks[task.id.removeprefix(f"{NAME}/")]
        replies: list[Message] = []
        for step in found.steps:
            replies.append(_solution_call(found, step, len(replies)))
            replies.append(Message(role="assistant", content="Done."))
        return scripted_policy(*replies)


def _solution_call(task: HarborTask, step: TaskStep, count: int) -> Message:
    if step.solution is None:
        raise EnvError(f"{task.name}: {step.label} has no solution")
    archive = base64.b64encode(pack(step.solution, "")).decode()
    command = (
        f"mkdir -p {SOLUTION} && echo {archive} | base64 -d | tar -xf - -C {SOLUTION}"
        f" && bash {SOLUTION}/solve.sh"
    )
    call = ToolCall(id=f"call_{count}", name="shell", arguments={"command": command})
    return Message(role="assistant", content="", tool_calls=(call,))


class HarborTrialBackend:
    """A `TerminalBackend` with a trial of a Harbor task."""

    def __init__(self, task: HarborTask, settings: HarborEnvSettings) -> None:
        self.task, self.settings = task, settings
        self.trial = Trial(task, settings.harbor)
        self._verified = 0  # number of steps
        self._deadline = float("inf")
        self._stopped = False  # a step missed its minimum reward
        self._note = ""  # why a step could not be verified

    async def start(self) -> ShellSession:
        await self.trial.start()
        sandbox = self.trial.agent_sandbox
        assert sandbox is not None
        await self._begin(self.task.steps[0])
        user = self.task.agent_config(self.task.steps[0]).user
        return ShellSession(
            sandbox.box,
            cwd=sandbox.workdir,
            env=sandbox.env,
            user=sandbox.image.user if user is None else user,
        )

    async def _begin(self, step: TaskStep) -> None:
        await self.trial.begin_step(step)
        seconds = self.task.agent_config(step).timeout_sec or self.settings.agent_timeout_s
        self._deadline = time.monotonic() + seconds * self.settings.harbor.timeout_multiplier

    def timed_out(self) -> bool:
        return time.monotonic() > self._deadline

    async def next_instruction(self) -> tuple[Message, ...]:
        if self._verified + 1 >= len(self.task.steps):
            return ()
        await self._verify()
        if self._stopped:
            return ()
        step = self.task.steps[self._verified]
        await self._begin(step)
        return (Message(role="user", content=step.instruction.strip()),)

    async def _verify(self) -> None:
        """Verify the current step.

        If the verifier fails although it works in a fresh sandbox, the policy caused it and the
        step has reward 0.
        """
        step = self.task.steps[self._verified]
        try:
            await self.trial.verify(step)
        except (SandboxError, RolloutFailed) as error:
            await self._raise_unless_verifier_works(step, error)
            self.trial.rewards.append({"reward": 0.0})
            self._note = f"it cannot be verified as it was left: {error}"
        self._verified += 1
        self._stopped = bool(self._note) or not self.trial.may_continue(step)
        if not self._stopped:
            sandbox = self.trial.agent_sandbox
            assert sandbox is not None
            # The next step must not see the tests of this one.
            await sandbox.box.exec(["rm", "-rf", "/tests"], cwd="/")

    async def _raise_unless_verifier_works(
        self, step: TaskStep, error: SandboxError | RolloutFailed
    ) -> None:
        """Raises the error unless the step's verifier works after the reference solution, or in an
        untouched environment if there is none. Tested once per step."""
        key = (str(self.task.folder), step.label)
        if key not in _verifier_works:
            _verifier_works[key] = await self._test_verifier(step)
        if not _verifier_works[key]:
            if isinstance(error, RolloutFailed):
                raise error
            raise RolloutFailed("infrastructure", "verify", str(error)) from error

    async def _test_verifier(self, step: TaskStep) -> bool:
        trial = Trial(self.task, self.settings.harbor)
        try:
            await trial.start()
            await trial.begin_step(step)
            if step.solution is not None:
                await trial.run_oracle(step)
            await trial.verify(step)
        except (SandboxError, RolloutFailed):
            return False
        finally:
            await trial.close()
        return True

    async def score(self) -> Verdict:
        if self._verified < len(self.task.steps) and not self._stopped:
            await self._verify()
        rewards = self.trial.total_rewards()
        assert rewards is not None  # a step without rewards has raised
        note = self._note or _note(self.task.steps, self._verified)
        return Verdict(reward=scalar_reward(rewards), parts=dict(rewards), note=note)

    async def close(self) -> None:
        await self.trial.close()


def _note(steps: Sequence[TaskStep], count: int) -> str:
    return "" if len(steps) == 1 else f"{count} of {len(steps)} steps were reached"
