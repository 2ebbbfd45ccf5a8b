"""Small functions to write: so many steps, each simple, in order."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random
from types import CodeType
from typing import Any, Literal

from paddock.envs.code.grade import HiddenTests
from paddock.envs.problems import Problem

Family = Literal["numbers", "texts"]
LEVELS = 5
_CHECKS = 8


@dataclass(frozen=True, slots=True)
class Op:
    """A step in words and in Python; {n} is a small number in both."""

    said: str
    code: str


NUMBERS = (
    Op("keep only the even numbers", "x = [v for v in x if v % 2 == 0]"),
    Op("keep only the odd numbers", "x = [v for v in x if v % 2 == 1]"),
    Op("keep only the numbers above {n}", "x = [v for v in x if v > {n}]"),
    Op("double every number", "x = [2 * v for v in x]"),
    Op("add {n} to every number", "x = [v + {n} for v in x]"),
    Op("square every number", "x = [v * v for v in x]"),
    Op("put them in reverse order", "x = x[::-1]"),
    Op("sort them from small to large", "x = sorted(x)"),
    Op("sort them from large to small", "x = sorted(x, reverse=True)"),
    Op("drop every number that stood there before", "x = list(dict.fromkeys(x))"),
    Op("keep only the first {n}", "x = x[:{n}]"),
    Op("drop the first {n}", "x = x[{n}:]"),
    Op(
        "replace each number by the sum of all up to and including it",
        "x = [sum(x[: i + 1]) for i in range(len(x))]",
    ),
    Op("replace every number by its remainder by {n}", "x = [v % {n} for v in x]"),
    Op("keep every second number, beginning with the first", "x = x[::2]"),
)
TEXTS = (
    Op("turn it into capital letters", "x = x.upper()"),
    Op("reverse it", "x = x[::-1]"),
    Op(
        "remove all vowels (a, e, i, o, u, large and small)",
        "x = ''.join(c for c in x if c.lower() not in 'aeiou')",
    ),
    Op(
        "put its words in reverse order, with one space between them",
        "x = ' '.join(x.split()[::-1])",
    ),
    Op("double every character", "x = ''.join(2 * c for c in x)"),
    Op("remove all spaces", "x = x.replace(' ', '')"),
    Op("keep only its first {n} characters", "x = x[:{n}]"),
    Op("drop its first {n} characters", "x = x[{n}:]"),
    Op("put the number of its characters behind it", "x = x + str(len(x))"),
    Op(
        "make the first letter of every word a capital, the others small, with one space between",
        "x = ' '.join(w.capitalize() for w in x.split())",
    ),
    Op("move its first character to the end", "x = x[1:] + x[:1]"),
    Op("replace every 'a' by '{n}'", "x = x.replace('a', '{n}')"),
)
_OPS: dict[Family, tuple[Op, ...]] = {"numbers": NUMBERS, "texts": TEXTS}
_GIVEN = {"numbers": "a list of whole numbers", "texts": "a text"}
_VERBS = ("make", "turn", "build", "change", "work", "shape", "mix", "fold")
_NOUNS = ("row", "line", "path", "chain", "strip", "band", "track", "order")
_WORDS = ("oak", "Elm", "a fir", "ash tree", "yew", "Box", "pine and", "lime", "a", "birch")


def draw(rng: Random, families: tuple[Family, ...], level: int) -> Problem:
    """A function of `level` steps, with eight hidden tests that tell it from every function that
    leaves one step out."""
    family = rng.choice(families)
    while True:
        ops = [_filled(rng, op) for op in rng.sample(_OPS[family], level)]
        given = [_input(rng, family) for _ in range(_CHECKS)]
        right = [_run(ops, value) for value in given]
        shorter = [ops[:at] + ops[at + 1 :] for at in range(level)]
        if all([_run(short, value) for value in given] != right for short in shorter):
            break
    name = f"{rng.choice(_VERBS)}_{rng.choice(_NOUNS)}"
    return _problem(name, family, ops, list(zip(given, right, strict=True)))


def _problem(name: str, family: Family, ops: list[Op], pairs: list[tuple[Any, Any]]) -> Problem:
    steps = "\n".join(f"{place}. {op.said}" for place, op in enumerate(ops, start=1))
    question = (
        f"Write a Python function {name}(x). It takes {_GIVEN[family]}, does this in order, and "
        f"returns what comes out:\n{steps}\n\n"
        f"For example, {name}({pairs[0][0]!r}) returns {pairs[0][1]!r}."
    )
    cases = tuple(([value], found) for value, found in pairs)
    return Problem(
        question=question,
        answer=source(name, ops),
        near=tuple(source(name, ops[:at] + ops[at + 1 :]) for at in range(len(ops))),
        hidden=HiddenTests(entry=name, cases=cases).text(),
    )


def source(name: str, ops: list[Op]) -> str:
    """The function that takes these steps."""
    return "\n".join([f"def {name}(x):", *(f"    {op.code}" for op in ops), "    return x"])


def _filled(rng: Random, op: Op) -> Op:
    number = str(rng.randint(2, 5))
    return Op(op.said.replace("{n}", number), op.code.replace("{n}", number))


def _input(rng: Random, family: Family) -> Any:
    makers: dict[Family, Callable[[], Any]] = {
        "numbers": lambda: [rng.randint(0, 12) for _ in range(rng.randint(0, 9))],
        "texts": lambda: " ".join(rng.choices(_WORDS, k=rng.randint(0, 5))),
    }
    return makers[family]()


def _run(ops: list[Op], value: Any) -> Any:
    names = {"x": value}
    for op in ops:
        exec(_compiled(op.code), names)
    return names["x"]


@cache
def _compiled(code: str) -> CodeType:
    return compile(code, "<step>", "exec")
