"""Small functions to write: so many steps, each simple, in order."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random
from types import CodeType
from typing import Any, Literal

from paddock.envs.code.verifier import HiddenTests
from paddock.envs.datasets import QAExample

Family = Literal["numbers", "texts"]
LEVELS = 5
_CHECKS = 8


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """A step in words and in Python; {n} is a small number in both."""

    said: str
    code: str


NUMBERS = (
    ProgramStep("keep only the even numbers", "x = [v for v in x if v % 2 == 0]"),
    ProgramStep("keep only the odd numbers", "x = [v for v in x if v % 2 == 1]"),
    ProgramStep("keep only the numbers above {n}", "x = [v for v in x if v > {n}]"),
    ProgramStep("double every number", "x = [2 * v for v in x]"),
    ProgramStep("add {n} to every number", "x = [v + {n} for v in x]"),
    ProgramStep("square every number", "x = [v * v for v in x]"),
    ProgramStep("put them in reverse order", "x = x[::-1]"),
    ProgramStep("sort them from small to large", "x = sorted(x)"),
    ProgramStep("sort them from large to small", "x = sorted(x, reverse=True)"),
    ProgramStep("drop every number that stood there before", "x = list(dict.fromkeys(x))"),
    ProgramStep("keep only the first {n}", "x = x[:{n}]"),
    ProgramStep("drop the first {n}", "x = x[{n}:]"),
    ProgramStep(
        "replace each number by the sum of all up to and including it",
        "x = [sum(x[: i + 1]) for i in range(len(x))]",
    ),
    ProgramStep("replace every number by its remainder by {n}", "x = [v % {n} for v in x]"),
    ProgramStep("keep every second number, beginning with the first", "x = x[::2]"),
)
TEXTS = (
    ProgramStep("turn it into capital letters", "x = x.upper()"),
    ProgramStep("reverse it", "x = x[::-1]"),
    ProgramStep(
        "remove all vowels (a, e, i, o, u, large and small)",
        "x = ''.join(c for c in x if c.lower() not in 'aeiou')",
    ),
    ProgramStep(
        "put its words in reverse order, with one space between them",
        "x = ' '.join(x.split()[::-1])",
    ),
    ProgramStep("double every character", "x = ''.join(2 * c for c in x)"),
    ProgramStep("remove all spaces", "x = x.replace(' ', '')"),
    ProgramStep("keep only its first {n} characters", "x = x[:{n}]"),
    ProgramStep("drop its first {n} characters", "x = x[{n}:]"),
    ProgramStep("put the number of its characters behind it", "x = x + str(len(x))"),
    ProgramStep(
        "make the first letter of every word a capital, the others small, with one space between",
        "x = ' '.join(w.capitalize() for w in x.split())",
    ),
    ProgramStep("move its first character to the end", "x = x[1:] + x[:1]"),
    ProgramStep("replace every 'a' by '{n}'", "x = x.replace('a', '{n}')"),
)
_OPS: dict[Family, tuple[ProgramStep, ...]] = {"numbers": NUMBERS, "texts": TEXTS}
_GIVEN = {"numbers": "a list of whole numbers", "texts": "a text"}
_VERBS = ("make", "turn", "build", "change", "work", "shape", "mix", "fold")
_NOUNS = ("row", "line", "path", "chain", "strip", "band", "track", "order")
_WORDS = ("oak", "Elm", "a fir", "ash tree", "yew", "Box", "pine and", "lime", "a", "birch")


def generate_example(rng: Random, families: tuple[Family, ...], level: int) -> QAExample:
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


def _problem(
    name: str, family: Family, ops: list[ProgramStep], pairs: list[tuple[Any, Any]]
) -> QAExample:
    steps = "\n".join(f"{place}. {op.said}" for place, op in enumerate(ops, start=1))
    question = (
        f"Write a Python function {name}(x). It takes {_GIVEN[family]}, does this in order, and "
        f"returns what comes out:\n{steps}\n\n"
        f"For example, {name}({pairs[0][0]!r}) returns {pairs[0][1]!r}."
    )
    cases = tuple(([value], found) for value, found in pairs)
    return QAExample(
        question=question,
        answer=function_source(name, ops),
        near=tuple(function_source(name, ops[:at] + ops[at + 1 :]) for at in range(len(ops))),
        hidden=HiddenTests(entry=name, cases=cases).to_json(),
    )


def function_source(name: str, ops: list[ProgramStep]) -> str:
    """The function that takes these steps."""
    return "\n".join([f"def {name}(x):", *(f"    {op.code}" for op in ops), "    return x"])


def _filled(rng: Random, op: ProgramStep) -> ProgramStep:
    number = str(rng.randint(2, 5))
    return ProgramStep(op.said.replace("{n}", number), op.code.replace("{n}", number))


def _input(rng: Random, family: Family) -> Any:
    makers: dict[Family, Callable[[], Any]] = {
        "numbers": lambda: [rng.randint(0, 12) for _ in range(rng.randint(0, 9))],
        "texts": lambda: " ".join(rng.choices(_WORDS, k=rng.randint(0, 5))),
    }
    return makers[family]()


def _run(ops: list[ProgramStep], value: Any) -> Any:
    names = {"x": value}
    for op in ops:
        exec(_compiled(op.code), names)
    return names["x"]


@cache
def _compiled(code: str) -> CodeType:
    return compile(code, "<step>", "exec")
