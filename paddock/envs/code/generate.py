"""Generated functions to write: a number of simple steps, in order."""

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
_TESTS = 8


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """One step in English and in Python; {n} is a small number in both."""

    text: str
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
_STEPS: dict[Family, tuple[ProgramStep, ...]] = {"numbers": NUMBERS, "texts": TEXTS}
_INPUTS = {"numbers": "a list of whole numbers", "texts": "a text"}
_VERBS = ("make", "turn", "build", "change", "work", "shape", "mix", "fold")
_NOUNS = ("row", "line", "path", "chain", "strip", "band", "track", "order")
_WORDS = ("oak", "Elm", "a fir", "ash tree", "yew", "Box", "pine and", "lime", "a", "birch")


def generate_example(rng: Random, families: tuple[Family, ...], level: int) -> QAExample:
    """A function of `level` steps, with hidden tests that fail for every function without one of
    the steps."""
    family = rng.choice(families)
    while True:
        steps = [_fill_number(rng, step) for step in rng.sample(_STEPS[family], level)]
        inputs = [_input(rng, family) for _ in range(_TESTS)]
        outputs = [_run(steps, value) for value in inputs]
        shorter = [steps[:at] + steps[at + 1 :] for at in range(level)]
        if all([_run(short, value) for value in inputs] != outputs for short in shorter):
            break
    name = f"{rng.choice(_VERBS)}_{rng.choice(_NOUNS)}"
    return _example(name, family, steps, list(zip(inputs, outputs, strict=True)))


def _example(
    name: str, family: Family, steps: list[ProgramStep], pairs: list[tuple[Any, Any]]
) -> QAExample:
    listed = "\n".join(f"{number}. {step.text}" for number, step in enumerate(steps, start=1))
    question = (
        f"Write a Python function {name}(x). It takes {_INPUTS[family]}, does this in order, and "
        f"returns what comes out:\n{listed}\n\n"
        f"For example, {name}({pairs[0][0]!r}) returns {pairs[0][1]!r}."
    )
    cases = tuple(([value], result) for value, result in pairs)
    return QAExample(
        question=question,
        answer=function_source(name, steps),
        near=tuple(function_source(name, steps[:at] + steps[at + 1 :]) for at in range(len(steps))),
        hidden=HiddenTests(entry=name, cases=cases).to_json(),
    )


def function_source(name: str, steps: list[ProgramStep]) -> str:
    """Source of the function that does these steps."""
    return "\n".join([f"def {name}(x):", *(f"    {step.code}" for step in steps), "    return x"])


def _fill_number(rng: Random, step: ProgramStep) -> ProgramStep:
    number = str(rng.randint(2, 5))
    return ProgramStep(step.text.replace("{n}", number), step.code.replace("{n}", number))


def _input(rng: Random, family: Family) -> Any:
    makers: dict[Family, Callable[[], Any]] = {
        "numbers": lambda: [rng.randint(0, 12) for _ in range(rng.randint(0, 9))],
        "texts": lambda: " ".join(rng.choices(_WORDS, k=rng.randint(0, 5))),
    }
    return makers[family]()


def _run(steps: list[ProgramStep], value: Any) -> Any:
    names = {"x": value}
    for step in steps:
        exec(_compiled(step.code), names)
    return names["x"]


@cache
def _compiled(code: str) -> CodeType:
    return compile(code, "<step>", "exec")
