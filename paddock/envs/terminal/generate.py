"""Puzzles of chance: which families there are, and how a level is made of them."""

import shutil
from collections.abc import Callable, Sequence
from random import Random

from paddock.envs.terminal import families, families_programs
from paddock.envs.terminal.puzzle import Goal, Puzzle

FAMILIES: dict[str, Callable[[Random, int, str], Goal]] = {
    "files": families.sort_files,
    "text": families.table,
    "permissions": families.permissions,
    "logs": families.logs,
    "search": families.find_word,
    "settings": families.settings,
    "script": families_programs.repair,
    "archive": families_programs.archive,
    "git": families_programs.repository,
}
NEEDS = {"git": "git"}  # a program that must be there


def available() -> tuple[str, ...]:
    """The families whose programs this machine has."""
    return tuple(name for name in FAMILIES if shutil.which(NEEDS.get(name, "sh")))


def puzzle(chance: Random, level: int, names: Sequence[str]) -> Puzzle:
    """As many goals as the level says, each as large as the level says."""
    goals = []
    for i in range(level):
        name = chance.choice(names)
        folder = families.words(chance, 1)[0] + (f"{i + 1}" if level > 1 else "")
        goals.append(FAMILIES[name](chance, level, folder))
    return Puzzle(goals=tuple(goals), level=level)
