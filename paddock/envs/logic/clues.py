"""A puzzle from the clues that leave one solution.

Clues are tried in random order and kept if they rule something out, until only the truth is left.
So every puzzle has exactly one solution, and every clue says something the ones before did not.
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
    """The first of the clues that leave one of the solutions; None if all of them leave more."""
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
    """All that the clues leave."""
    clues = tuple(clues)
    return [solution for solution in solutions if all(clue.holds(solution) for clue in clues)]
