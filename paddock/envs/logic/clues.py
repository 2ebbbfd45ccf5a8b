"""Clue selection: add clues until one solution is left.

Clues are tried in random order and kept if they exclude a solution. Every puzzle therefore has
exactly one solution, and every clue adds information to the ones before it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S")  # a solution


@dataclass(frozen=True, slots=True)
class Clue(Generic[S]):
    text: str
    holds: Callable[[S], bool]


def minimal_clues(clues: Iterable[Clue[S]], solutions: Sequence[S]) -> tuple[Clue[S], ...] | None:
    """The informative clues until exactly one solution is left; None if all clues leave more."""
    kept: list[Clue[S]] = []
    left = list(solutions)
    for clue in clues:
        if len(left) == 1:
            break
        still = [solution for solution in left if clue.holds(solution)]
        if len(still) < len(left):
            kept.append(clue)
            left = still
    return tuple(kept) if len(left) == 1 else None


def consistent_solutions(clues: Iterable[Clue[S]], solutions: Sequence[S]) -> list[S]:
    """All solutions that satisfy the clues."""
    clues = tuple(clues)
    return [solution for solution in solutions if all(clue.holds(solution) for clue in clues)]
