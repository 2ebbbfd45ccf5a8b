"""Whether a task is sound: its solution passes, doing nothing fails, and nobody can read the tests
before they are graded by them."""

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
SMALLEST = 24  # bytes: shorter files are alike by chance
# Everything an image or a task may have laid somewhere; not the system's own thousands of files.
FIND_FILES_COMMAND = (
    "find / -xdev -type f -size -4096k -not -path '/proc/*' -not -path '/usr/lib/*'"
    " -not -path '/usr/share/*' -not -path '/usr/include/*' -not -path '/usr/bin/*'"
    " -print0 2>/dev/null | xargs -0 -r sha256sum 2>/dev/null"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCheckReport:
    """What came of checking one task."""

    task: str
    solution: reward.Rewards | None = None  # None: there is none, or it came to no verdict
    empty: reward.Rewards | None = None
    readable: tuple[str, ...] = ()  # files inside that give the tests or the solution away
    problems: tuple[str, ...] = field(default=())
    notes: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        return not self.problems


async def check_task(task: HarborTask, settings: HarborSettings) -> TaskCheckReport:
    problems: list[str] = []
    notes = [*task.notes, *(f"unknown key {name} in task.toml" for name in task.unknown)]
    empty, readable = await _empty(task, settings, problems, notes)
    if empty is not None and reward.scalar_reward(empty) >= PASS_REWARD:
        problems.append(f"doing nothing is worth {reward.scalar_reward(empty):g}")
    problems += [f"the agent can read {path}" for path in readable]
    solution = None
    if all(step.solution is not None for step in task.steps):
        solution = await _solved(task, settings, problems)
        if solution is not None and reward.scalar_reward(solution) < PASS_REWARD:
            hint = _hint(task, settings)
            problems.append(f"the solution is worth {reward.scalar_reward(solution):g}{hint}")
    else:
        notes.append("no solution: that the task can be solved is not shown")
    return TaskCheckReport(
        task=task.name,
        solution=solution,
        empty=empty,
        readable=tuple(readable),
        problems=tuple(problems),
        notes=tuple(dict.fromkeys(notes)),
    )


async def _empty(
    task: HarborTask, settings: HarborSettings, problems: list[str], notes: list[str]
) -> tuple[reward.Rewards | None, list[str]]:
    """Do nothing, look around before each grading, and be graded."""
    trial = Trial(task, settings)
    readable: list[str] = []
    try:
        await trial.start()
        assert trial.place is not None
        notes += trial.place.image.notes
        for step in task.steps:
            await trial.begin_step(step)
            readable += await _given_away(trial, task)
            await trial.verify(step)
            await trial.place.box.exec(["rm", "-rf", TESTS], cwd="/")
            if not trial.may_continue(step):
                break
        return trial.total_rewards(), readable
    except (RolloutFailed, SandboxError) as stop:
        # Tests that do not end without a solution fail nobody, but nothing passes them either.
        endless = isinstance(stop, TrialFailed) and stop.exception == "VerifierTimeoutError"
        (notes if endless else problems).append(f"doing nothing came to no verdict: {stop}")
        return None, readable
    finally:
        await trial.close()


async def _solved(
    task: HarborTask, settings: HarborSettings, problems: list[str]
) -> reward.Rewards | None:
    trial = Trial(task, settings)
    try:
        await trial.start()
        for step in task.steps:
            await trial.begin_step(step)
            done = await trial.run_oracle(step)
            if done.timed_out:
                problems.append(f"the solution of {step.label} ran out of time")
            await trial.verify(step)
            if not trial.may_continue(step):
                problems.append(f"after the solution of {step.label} no further step is reached")
                break
        return trial.total_rewards()
    except (RolloutFailed, SandboxError) as stop:
        problems.append(f"the solution came to no verdict: {stop}")
        return None
    finally:
        await trial.close()


def _hint(task: HarborTask, settings: HarborSettings) -> str:
    """What may be wrong with a solution whose work the tests do not see."""
    own = any(task.separate_verifier(step) is not None for step in task.steps)
    sees = {verifier_view(task, step, settings) for step in task.steps}
    if own or "files" not in sees:
        return ""
    return (
        "; if it changes system folders or starts services, which the tests do not see, say"
        " verifier_sees = 'system' or 'processes' in the table metadata.paddock of task.toml"
    )


async def _given_away(trial: Trial, task: HarborTask) -> list[str]:
    """Files inside with the content of a test or of the solution."""
    assert trial.place is not None
    hidden = set(_hashes(task))
    found = await trial.place.box.exec(FIND_FILES_COMMAND, cwd="/", timeout_s=120)
    rows = [line.partition("  ") for line in found.stdout.splitlines()]
    given = [path for mark, _, path in rows if mark.lstrip("\\") in hidden]
    there = await trial.place.box.exec(f"ls -A {TESTS} {SOLUTION} 2>/dev/null | grep -v :", cwd="/")
    return given + ([TESTS] if there.stdout.strip() else [])


def _hashes(task: HarborTask) -> Iterator[str]:
    folders: list[Path] = []
    for step in task.steps:
        folders += [*step.tests, *([step.solution] if step.solution else [])]
    for folder in dict.fromkeys(folders):
        for file in folder.rglob("*"):
            if file.is_file() and file.stat().st_size >= SMALLEST:
                yield hashlib.sha256(file.read_bytes()).hexdigest()
