"""Orderings of books on a shelf, and houses with owners, pets and drinks (zebra puzzles)."""

from collections.abc import Iterator
from itertools import permutations, product
from random import Random

from paddock.envs.datasets import QAExample
from paddock.envs.logic.clues import Clue, minimal_clues

Row = tuple[str, ...]  # things from left to right
Street = tuple[Row, ...]  # one row per kind of thing, one entry per house

_BOOKS = ("amber", "black", "coral", "green", "ivory", "olive", "white")
_KINDS = {
    "people": ("Anna", "Bert", "Cora", "Dina", "Egon"),
    "pets": ("cat", "dog", "fox", "owl", "rat"),
    "drinks": ("beer", "cola", "milk", "tea", "water"),
}
_STREETS = ((3, 2), (3, 3), (4, 2), (4, 3), (5, 2))  # houses and kinds, by level


def generate_ordering(rng: Random, level: int) -> QAExample:
    """`level` + 2 books on a shelf."""
    things = rng.sample(_BOOKS, level + 2)
    truth = tuple(things)
    clues = minimal_clues(_row_clues(rng, truth), list(permutations(sorted(things))))
    assert clues is not None, "a clue for every position leaves one order"
    question = (
        f"{len(things)} books stand on a shelf: {', '.join(sorted(things))}. "
        f"{' '.join(clue.text for clue in clues)} "
        "Name them from left to right, with commas between them."
    )
    swapped = (truth[1], truth[0], *truth[2:])
    near = (", ".join(truth[::-1]), ", ".join(swapped))
    return QAExample(question=question, answer=", ".join(truth), near=near)


def _row_clues(rng: Random, truth: Row) -> Iterator[Clue[Row]]:
    """Weak clues in random order, then the position of each thing, which leaves one solution."""
    weak = [clue for a, b in permutations(truth, 2) for clue in _pair_clues(truth, a, b)]
    rng.shuffle(weak)
    yield from weak
    yield from (_position_clue(at, thing) for at, thing in enumerate(truth))


def _position_clue(at: int, thing: str) -> Clue[Row]:
    return Clue(f"Number {at + 1} is {thing}.", lambda row: row[at] == thing)


def _pair_clues(truth: Row, a: str, b: str) -> Iterator[Clue[Row]]:
    gap = truth.index(b) - truth.index(a)
    if gap > 0:
        yield Clue(f"The {a} one is left of the {b} one.", lambda row: row.index(a) < row.index(b))
    if gap > 1:
        between = "stands one book" if gap == 2 else f"stand {gap - 1} books"
        yield Clue(
            f"Between the {a} and the {b} one {between}.",
            lambda row: abs(row.index(b) - row.index(a)) == gap,
        )
    if abs(gap) > 1 and a < b:
        yield Clue(
            f"The {a} and the {b} one are not neighbours.",
            lambda row: abs(row.index(b) - row.index(a)) > 1,
        )


def generate_houses(rng: Random, level: int) -> QAExample:
    """A street: each house has a person, a pet and, at some levels, a drink."""
    count, kinds = _STREETS[level - 1]
    things = [sorted(rng.sample(words, count)) for words in list(_KINDS.values())[:kinds]]
    truth: Street = tuple(tuple(rng.sample(words, count)) for words in things)
    streets: list[Street] = list(product(*(permutations(words) for words in things)))
    clues = list(_street_clues(truth))
    rng.shuffle(clues)
    kept = minimal_clues([*clues, *_exact_clues(truth)], streets)
    assert kept is not None, "a clue for every house leaves one street"
    names = [f"{kind}: {', '.join(w)}" for kind, w in zip(_KINDS, things, strict=False)]
    question = (
        f"{count} houses stand in a row, numbered from 1. To each belong one of these: "
        f"{'; '.join(names)}. {' '.join(clue.text for clue in kept)} "
        "Name the pets from house 1 on, then the people from house 1 on, with commas between them."
    )
    people, pets = truth[0], truth[1]
    near = (", ".join(pets[::-1] + people), ", ".join(pets + people[1:] + people[:1]))
    return QAExample(question=question, answer=", ".join(pets + people), near=near)


def _street_clues(truth: Street) -> Iterator[Clue[Street]]:
    for a, b in permutations([thing for row in truth for thing in row], 2):
        yield from _relation_clues(truth, a, b)


def _relation_clues(truth: Street, a: str, b: str) -> Iterator[Clue[Street]]:
    kind_a, kind_b = (next(k for k, row in enumerate(truth) if x in row) for x in (a, b))

    def gap(street: Street) -> int:
        return street[kind_b].index(b) - street[kind_a].index(a)

    steps, first, second = gap(truth), _with_article(a).capitalize(), _with_article(b)
    if steps == 1:
        yield Clue(f"{first} is directly left of {second}.", lambda street: gap(street) == 1)
    if steps > 0:
        yield Clue(f"{first} is somewhere left of {second}.", lambda street: gap(street) > 0)
    if kind_a < kind_b and steps == 0:
        text = f"{first} and {second} belong to the same house."
        yield Clue(text, lambda street: gap(street) == 0)
    if kind_a < kind_b and steps != 0:
        text = f"{first} and {second} belong to different houses."
        yield Clue(text, lambda street: gap(street) != 0)


def _exact_clues(truth: Street) -> Iterator[Clue[Street]]:
    for kind, row in enumerate(truth):
        yield from (_house_clue(kind, house, thing) for house, thing in enumerate(row))


def _house_clue(kind: int, house: int, thing: str) -> Clue[Street]:
    text = f"{_with_article(thing).capitalize()} is in house {house + 1}."
    return Clue(text, lambda street: street[kind][house] == thing)


def _with_article(thing: str) -> str:
    return thing if thing[0].isupper() else f"the {thing}"
