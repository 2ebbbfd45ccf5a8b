"""Task generator: subtask families, and how a task of a level is composed of them."""

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
NEEDS = {"git": "git"}  # program that a family requires


def available_families() -> tuple[str, ...]:
    """Families whose required programs are installed."""
    return tuple(name for name in FAMILIES if shutil.which(NEEDS.get(name, "sh")))


def generate_task(rng: Random, level: int, names: Sequence[str]) -> TerminalTask:
    """A task with `level` subtasks, each of the size of that level."""
    subtasks = []
    for i in range(level):
        name = rng.choice(names)
        folder = subtasks_files.words(rng, 1)[0] + (f"{i + 1}" if level > 1 else "")
        subtasks.append(FAMILIES[name](rng, level, folder))
    return TerminalTask(subtasks=tuple(subtasks), level=level)
