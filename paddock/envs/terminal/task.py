"""Generated terminal tasks: initial files, instruction, checks of the final state, solution.

A task has one or more subtasks, each in its own directory. The expected final state is data
(`StateCheck`), so that the verifier never runs what the policy wrote unless the subtask is about a
program.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

CheckKind = Literal["text", "lines", "absent", "mode", "runs", "archive", "link", "tree", "commits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCheck:
    """A check of a path: kind `how` with a `value`. sandboxed_checks.py implements the kinds."""

    how: CheckKind
    path: str
    value: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFile:
    path: str
    text: str = ""
    mode: int = 0o644


@dataclass(frozen=True, slots=True, kw_only=True)
class Subtask:
    """One thing to do. Paths are relative to the workspace, in which commands run."""

    family: str
    instruction: str
    files: tuple[TaskFile, ...]
    checks: tuple[StateCheck, ...]
    solution: str
    wrong: tuple[str, ...]  # commands of plausible wrong solutions; each must fail
    setup: str = ""  # command to run after the files are written


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalTask:
    """A generated task: one or more subtasks."""

    subtasks: tuple[Subtask, ...]
    level: int

    @property
    def instruction(self) -> str:
        if len(self.subtasks) == 1:
            return self.subtasks[0].instruction
        rows = [f"{i}. {subtask.instruction}" for i, subtask in enumerate(self.subtasks, 1)]
        return "Do all of this:\n" + "\n".join(rows)

    @property
    def files(self) -> tuple[TaskFile, ...]:
        return tuple(file for subtask in self.subtasks for file in subtask.files)

    @property
    def setup(self) -> str:
        return "\n".join(subtask.setup for subtask in self.subtasks if subtask.setup)

    @property
    def checks(self) -> tuple[StateCheck, ...]:
        return tuple(check for subtask in self.subtasks for check in subtask.checks)

    @property
    def solution(self) -> tuple[str, ...]:
        return tuple(subtask.solution for subtask in self.subtasks)

    @property
    def wrong_solutions(self) -> tuple[tuple[str, ...], ...]:
        """Command lists that solve all subtasks but one."""
        solutions = []
        for i, subtask in enumerate(self.subtasks):
            for wrong in subtask.wrong:
                solutions.append((*self.solution[:i], wrong, *self.solution[i + 1 :]))
        return tuple(solutions)


def checks_json(checks: Sequence[StateCheck]) -> str:
    """Checks in the format that sandboxed_checks.py reads."""
    return json.dumps([asdict(check) for check in checks])


DOCKERFILE = "FROM debian:12\nWORKDIR /app\nCOPY files/ /app/\nCOPY setup.sh /tmp/setup.sh\n" + (
    "RUN cd /app && bash /tmp/setup.sh && rm /tmp/setup.sh\n"
)
TEST = """#!/bin/bash
cd /app && python3 /tests/check.py /tests/expects.json > /tmp/parts.json
python3 - <<'END'
import json
parts = json.load(open("/tmp/parts.json"))
rewards = {"reward": float(all(parts.values()))}
json.dump(rewards, open("/logs/verifier/reward.json", "w"))
END
"""


def write_harbor_task(task: TerminalTask, folder: Path) -> None:
    """Write a task in Harbor's format, for other harnesses."""
    program = Path(__file__).with_name("sandboxed_checks.py").read_text()
    texts = {
        "task.toml": 'schema_version = "1.4"\n[agent]\ntimeout_sec = 600.0\n',
        "instruction.md": f"{task.instruction}\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/setup.sh": f"{task.setup}\n",
        "tests/check.py": program,
        "tests/expects.json": checks_json(task.checks),
        "tests/test.sh": TEST,
        "solution/solve.sh": "#!/bin/bash\ncd /app\n" + "\n".join(task.solution) + "\n",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for file in task.files:
        path = folder / "environment" / "files" / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text)
        path.chmod(file.mode)
