"""Puzzles of chance: which families there are, and how a level is made of them."""

import shutil
from collections.abc import Callable, Sequence
from random import Random

from paddock.envs.terminal import subtasks_files, subtasks_programs
from paddock.envs.terminal.task import Subtask, TerminalTask

FAMILIES: dict[str, Callable[[Random, int, str], Subtask]] = {
    "files": subtasks_files.sort_files,
    "text": subtasks_files.table,
    "permissions": subtasks_files.permissions,
    "logs": subtasks_files.logs,
    "search": subtasks_files.find_word,
    "settings": subtasks_files.settings,
    "script": subtasks_programs.repair,
    "archive": subtasks_programs.archive,
    "git": subtasks_programs.repository,
}
NEEDS = {"git": "git"}  # a program that must be there


def available_families() -> tuple[str, ...]:
    """The families whose programs this machine has."""
    return tuple(name for name in FAMILIES if shutil.which(NEEDS.get(name, "sh")))


def generate_task(chance: Random, level: int, names: Sequence[str]) -> TerminalTask:
    """As many goals as the level says, each as large as the level says."""
    goals = []
    for i in range(level):
        name = chance.choice(names)
        folder = subtasks_files.words(chance, 1)[0] + (f"{i + 1}" if level > 1 else "")
        goals.append(FAMILIES[name](chance, level, folder))
    return TerminalTask(goals=tuple(goals), level=level)
