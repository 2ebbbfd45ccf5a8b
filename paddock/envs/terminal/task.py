"""Small terminal tasks: what is laid out, what is asked, and how one sees that it was done.

A goal is one thing to do, in a folder of its own; a puzzle is one or more goals. What must hold in
the end is said as data (`Expect`), so that a grader never runs what the player wrote, unless that
is what was asked for.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

CheckKind = Literal["text", "lines", "absent", "mode", "runs", "archive", "link", "tree", "commits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCheck:
    """What must hold: of a path, by `how`, with `value`. See `check_inside` for each."""

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
    """One thing to do. Paths are relative to the workspace; commands run there."""

    family: str
    instruction: str
    files: tuple[TaskFile, ...]
    expects: tuple[StateCheck, ...]
    solution: str
    wrong: tuple[str, ...]  # what a careless player does; each must fail
    setup: str = ""  # run once the files are laid


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalTask:
    goals: tuple[Subtask, ...]
    level: int

    @property
    def instruction(self) -> str:
        if len(self.goals) == 1:
            return self.goals[0].instruction
        rows = [f"{i}. {goal.instruction}" for i, goal in enumerate(self.goals, 1)]
        return "Do all of this:\n" + "\n".join(rows)

    @property
    def files(self) -> tuple[TaskFile, ...]:
        return tuple(file for goal in self.goals for file in goal.files)

    @property
    def setup(self) -> str:
        return "\n".join(goal.setup for goal in self.goals if goal.setup)

    @property
    def expects(self) -> tuple[StateCheck, ...]:
        return tuple(expect for goal in self.goals for expect in goal.expects)

    @property
    def solution(self) -> tuple[str, ...]:
        return tuple(goal.solution for goal in self.goals)

    @property
    def wrong_solutions(self) -> tuple[tuple[str, ...], ...]:
        """Solutions that go wrong at one goal."""
        found = []
        for i, goal in enumerate(self.goals):
            for wrong in goal.wrong:
                found.append((*self.solution[:i], wrong, *self.solution[i + 1 :]))
        return tuple(found)


def checks_json(expects: Sequence[StateCheck]) -> str:
    """Expectations as the checker inside reads them."""
    return json.dumps([asdict(expect) for expect in expects])


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


def write_harbor_task(puzzle: TerminalTask, folder: Path) -> None:
    """A puzzle as a Harbor task, for other harnesses."""
    inside = Path(__file__).with_name("sandboxed_checks.py").read_text()
    texts = {
        "task.toml": 'schema_version = "1.4"\n[agent]\ntimeout_sec = 600.0\n',
        "instruction.md": f"{puzzle.instruction}\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/setup.sh": f"{puzzle.setup}\n",
        "tests/check.py": inside,
        "tests/expects.json": checks_json(puzzle.expects),
        "tests/test.sh": TEST,
        "solution/solve.sh": "#!/bin/bash\ncd /app\n" + "\n".join(puzzle.solution) + "\n",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for file in puzzle.files:
        path = folder / "environment" / "files" / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text)
        path.chmod(file.mode)
