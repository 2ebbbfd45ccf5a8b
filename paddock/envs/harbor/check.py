"""Soundness check of a task: the solution passes, doing nothing fails, the tests are hidden."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paddock.envs.env import RolloutFailed
from paddock.envs.harbor import reward
from paddock.envs.harbor.failures import TrialFailed
from paddock.envs.harbor.settings import SOLUTION, TESTS, HarborSettings
from paddock.envs.harbor.task import HarborTask
from paddock.envs.harbor.trial import Trial
from paddock.envs.harbor.verifier_view import verifier_view
from paddock.sandbox import SandboxError

PASS_REWARD = 1.0
MIN_FILE_BYTES = 24  # shorter files may be equal by coincidence
# Files that an image or a task may have added, without the system's own.
FIND_FILES_COMMAND = (
    "find / -xdev -type f -size -4096k -not -path '/proc/*' -not -path '/usr/lib/*'"
    " -not -path '/usr/share/*' -not -path '/usr/include/*' -not -path '/usr/bin/*'"
    " -print0 2>/dev/null | xargs -0 -r sha256sum 2>/dev/null"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCheckReport:
    """Result of checking one task."""

    task: str
    solution: reward.Rewards | None = None  # None: no solution, or no verdict
    empty: reward.Rewards | None = None
    readable: tuple[str, ...] = ()  # visible files with the tests or the solution
    problems: tuple[str, ...] = field(default=())
    notes: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        return not self.problems


async def check_task(task: HarborTask, settings: HarborSettings) -> TaskCheckReport:
    """Run a trial without work and one with the reference solution, and report the problems."""
    problems: list[str] = []
    notes = [*task.notes, *(f"unknown key {name} in task.toml" for name in task.unknown)]
    empty, readable = await _run_empty(task, settings, problems, notes)
    if empty is not None and reward.scalar_reward(empty) >= PASS_REWARD:
        problems.append(f"doing nothing has reward {reward.scalar_reward(empty):g}")
    problems += [f"the agent can read {path}" for path in readable]
    solution = None
    if all(step.solution is not None for step in task.steps):
        solution = await _run_solution(task, settings, problems)
        if solution is not None and reward.scalar_reward(solution) < PASS_REWARD:
            hint = _hint(task, settings)
            problems.append(f"the solution has reward {reward.scalar_reward(solution):g}{hint}")
    else:
        notes.append("no solution: cannot check that the task is solvable")
    return TaskCheckReport(
        task=task.name,
        solution=solution,
        empty=empty,
        readable=tuple(readable),
        problems=tuple(problems),
        notes=tuple(dict.fromkeys(notes)),
    )


async def _run_empty(
    task: HarborTask, settings: HarborSettings, problems: list[str], notes: list[str]
) -> tuple[reward.Rewards | None, list[str]]:
    """A trial without work; looks for visible tests before each verification."""
    trial = Trial(task, settings)
    readable: list[str] = []
    try:
        await trial.start()
        assert trial.agent_sandbox is not None
        notes += trial.agent_sandbox.image.notes
        for step in task.steps:
            await trial.begin_step(step)
            readable += await _leaked_files(trial, task)
            await trial.verify(step)
            await trial.agent_sandbox.box.exec(["rm", "-rf", TESTS], cwd="/")
            if not trial.may_continue(step):
                break
        return trial.total_rewards(), readable
    except (RolloutFailed, SandboxError) as error:
        # Only a note if the tests time out without a solution: doing nothing does not pass then.
        timed_out = isinstance(error, TrialFailed) and error.exception == "VerifierTimeoutError"
        (notes if timed_out else problems).append(f"no verdict for doing nothing: {error}")
        return None, readable
    finally:
        await trial.close()


async def _run_solution(
    task: HarborTask, settings: HarborSettings, problems: list[str]
) -> reward.Rewards | None:
    trial = Trial(task, settings)
    try:
        await trial.start()
        for step in task.steps:
            await trial.begin_step(step)
            done = await trial.run_oracle(step)
            if done.timed_out:
                problems.append(f"the solution of {step.label} timed out")
            await trial.verify(step)
            if not trial.may_continue(step):
                problems.append(
                    f"after the solution of {step.label} the reward is below min_reward"
                )
                break
        return trial.total_rewards()
    except (RolloutFailed, SandboxError) as error:
        problems.append(f"no verdict for the solution: {error}")
        return None
    finally:
        await trial.close()


def _hint(task: HarborTask, settings: HarborSettings) -> str:
    """Advice for a solution whose changes the verifier may not see."""
    separate = any(task.separate_verifier(step) is not None for step in task.steps)
    views = {verifier_view(task, step, settings) for step in task.steps}
    if separate or "files" not in views:
        return ""
    return (
        "; if it changes system directories or starts services, which the tests do not see, set"
        " verifier_sees = 'system' or 'processes' in the table metadata.paddock of task.toml"
    )


async def _leaked_files(trial: Trial, task: HarborTask) -> list[str]:
    """Paths inside with the content of a test or of the solution."""
    assert trial.agent_sandbox is not None
    hidden = set(_hashes(task))
    listing = await trial.agent_sandbox.box.exec(FIND_FILES_COMMAND, cwd="/", timeout_s=120)
    rows = [line.partition("  ") for line in listing.stdout.splitlines()]
    leaked = [path for digest, _, path in rows if digest.lstrip("\\") in hidden]
    present = await trial.agent_sandbox.box.exec(
        f"ls -A {TESTS} {SOLUTION} 2>/dev/null | grep -v :", cwd="/"
    )
    return leaked + ([TESTS] if present.stdout.strip() else [])


def _hashes(task: HarborTask) -> Iterator[str]:
    folders: list[Path] = []
    for step in task.steps:
        folders += [*step.tests, *([step.solution] if step.solution else [])]
    for folder in dict.fromkeys(folders):
        for file in folder.rglob("*"):
            if file.is_file() and file.stat().st_size >= MIN_FILE_BYTES:
                yield hashlib.sha256(file.read_bytes()).hexdigest()
