"""Generated arithmetic and algebra problems with integer or fraction answers.

Each family generates problems of levels 1 to 5. Answers are exact fractions.
"""

from collections.abc import Callable
from fractions import Fraction
from random import Random
from typing import Literal

from paddock.envs.datasets import QAExample

Family = Literal[
    "arithmetic", "fractions", "linear", "system", "quadratic", "modular", "percent", "story"
]
LEVELS = 5


def generate_example(rng: Random, families: tuple[Family, ...], level: int) -> QAExample:
    """One problem of a random family."""
    return FAMILIES[rng.choice(families)](rng, level)


def arithmetic(rng: Random, level: int) -> QAExample:
    text, value, _ = _expression(rng, level + 1, 10 ** ((level + 2) // 2))
    return _problem(f"What is {text}?", value)


def fractions(rng: Random, level: int) -> QAExample:
    terms = [Fraction(rng.randint(1, 9), rng.randint(2, 3 + 3 * level)) for _ in range(level + 1)]
    signs = [rng.choice("+-") for _ in terms[1:]]
    text, value = _ratio(terms[0]), terms[0]
    for sign, term in zip(signs, terms[1:], strict=True):
        text, value = f"{text} {sign} {_ratio(term)}", value + (term if sign == "+" else -term)
    return _problem(f"What is {text}? Give a fraction in lowest terms or a whole number.", value)


def linear(rng: Random, level: int) -> QAExample:
    """a x + b = c x + d; from level 3 on the left side is multiplied by a factor."""
    limit = 4 + 5 * level
    x = Fraction(rng.randint(-limit, limit), rng.randint(1, level) if level > 1 else 1)
    a, b = _nonzero(rng, limit), rng.randint(-limit, limit)
    c = rng.choice([n for n in range(-limit, limit + 1) if n != a]) if level > 1 else 0
    k = rng.randint(2, 5) if level > 2 else 1
    # d = k (a x + b) - c x must be whole, so x's denominator goes into a and c.
    a, c = a * x.denominator, c * x.denominator
    if k * a == c:
        c += x.denominator
    d = k * (a * x + b) - c * x
    left = _sum([(a, "x"), (b, "")])
    left = f"{k}({left})" if k > 1 else left
    return _problem(f"Solve for x: {left} = {_sum([(c, 'x'), (int(d), '')])}", x)


def system(rng: Random, level: int) -> QAExample:
    """As many equations as unknowns: two, or three from level 4 on. The question is their sum."""
    names = "xyz" if level > 3 else "xy"
    limit = 3 * level
    values = [rng.randint(-limit, limit) for _ in names]
    while True:
        matrix = [[_nonzero(rng, level + 2) for _ in names] for _ in names]
        if _determinant(matrix):
            break
    lines = [
        f"{_sum(list(zip(row, names, strict=True)))} = "
        f"{sum(a * v for a, v in zip(row, values, strict=True))}"
        for row in matrix
    ]
    total = " + ".join(names)
    return _problem(f"Given {', '.join(lines)}: what is {total}?", Fraction(sum(values)))


def quadratic(rng: Random, level: int) -> QAExample:
    limit = 2 + 3 * level
    p = Fraction(rng.randint(-limit, limit), rng.randint(1, max(1, level - 1)))
    q = Fraction(rng.randint(-limit, limit), rng.randint(1, max(1, level - 2)))
    scale = p.denominator * q.denominator * (rng.randint(1, 3) if level > 1 else 1)
    terms = [(scale, "x^2"), (int(-scale * (p + q)), "x"), (int(scale * p * q), "")]
    return _problem(
        f"What is the largest solution of {_sum(terms)} = 0?", max(p, q), near=(min(p, q),)
    )


def modular(rng: Random, level: int) -> QAExample:
    base, power = rng.randint(2, 9 + 10 * level), rng.randint(2, 3**level + 2)
    modulus = rng.randint(5, 10 + 20 * level)
    value = pow(base, power, modulus)
    return _problem(f"What is the remainder when {base}^{power} is divided by {modulus}?", value)


def percent(rng: Random, level: int) -> QAExample:
    start = 100 * rng.randint(2, 8 * level)
    value, steps = Fraction(start), []
    for _ in range(level):
        share, rises = 5 * rng.randint(1, 10), rng.random() < 0.5
        value *= 1 + Fraction(share if rises else -share, 100)
        steps.append(f"{'rises' if rises else 'falls'} by {share}%")
    question = f"A price of {start} {', then '.join(steps)}. What is it in the end? Do not round."
    return _problem(question, value)


_PEOPLE = ("Ada", "Ben", "Chi", "Dov", "Eva", "Finn", "Gus", "Hal", "Ida", "Jun", "Kai", "Lea")
_THINGS = ("apples", "books", "coins", "eggs", "lamps", "nails", "pens", "shells", "stamps")


def word_problem(rng: Random, level: int) -> QAExample:
    """A word problem of `level` + 1 steps, with one irrelevant sentence from level 3 on."""
    who, other = rng.sample(_PEOPLE, 2)
    thing = rng.choice(_THINGS)
    value = rng.randint(4, 20 * level)
    lines = [f"{who} has {value} {thing}."]
    for _ in range(level + 1):
        line, value = _event(rng, value, other, thing)
        lines.append(line)
    if level > 2:
        idle = f"{other} is {rng.randint(7, 80)} years old."
        lines.insert(rng.randint(1, len(lines)), idle)
    return _problem(" ".join([*lines, f"How many {thing} does {who} have now?"]), value)


def _event(rng: Random, value: int, other: str, thing: str) -> tuple[str, int]:
    size = rng.randint(2, 9)
    kinds = ["gets", "boxes"] + (["gives"] if value > 2 else []) + ["times"] * (value < 500)
    divisors = [n for n in (2, 3, 4, 5) if value % n == 0 and value > n]
    match rng.choice(kinds + ["shares"] * bool(divisors)):
        case "gets":
            found = rng.randint(1, 30)
            return f"{other} brings {found} more.", value + found
        case "boxes":
            return f"Then come {size} boxes with {size + 1} {thing} each.", value + size * (
                size + 1
            )
        case "gives":
            lost = rng.randint(1, value - 1)
            return f"{lost} of them get lost.", value - lost
        case "times":
            return f"By next week there are {size} times as many.", value * size
        case _:
            parts = rng.choice(divisors)
            return f"They are shared equally among {parts} people, of whom one is the owner.", (
                value // parts
            )


FAMILIES: dict[Family, Callable[[Random, int], QAExample]] = {
    "arithmetic": arithmetic,
    "fractions": fractions,
    "linear": linear,
    "system": system,
    "quadratic": quadratic,
    "modular": modular,
    "percent": percent,
    "story": word_problem,
}


def _problem(question: str, value: Fraction | int, near: tuple[Fraction, ...] = ()) -> QAExample:
    value = Fraction(value)
    others = (*near, value + 1, value - 1, -value, value * 10, value / 10)
    wrong = tuple(dict.fromkeys(_ratio(other) for other in others if other != value))
    return QAExample(question=question, answer=_ratio(value), near=wrong)


def _expression(rng: Random, operations: int, limit: int) -> tuple[str, int, bool]:
    """An expression, its value, and whether it needs brackets inside a product."""
    if operations == 0:
        value = rng.randint(2, limit)
        return str(value), value, False
    left = rng.randrange(operations)
    a, x, a_is_sum = _expression(rng, left, limit)
    b, y, b_is_sum = _expression(rng, operations - 1 - left, limit)
    match rng.choice("+-*"):
        case "+":
            return f"{a} + {b}", x + y, True
        case "-":
            return f"{a} - {f'({b})' if b_is_sum else b}", x - y, True
        case _:
            return f"{f'({a})' if a_is_sum else a} * {f'({b})' if b_is_sum else b}", x * y, False


def _sum(terms: list[tuple[int, str]]) -> str:
    """A sum of terms in usual notation.

    >>> _sum([(1, "x"), (-2, "y"), (0, "z"), (3, "")]), _sum([(0, "x")])
    ('x - 2y + 3', '0')
    """
    text = ""
    for factor, name in terms:
        if factor:
            size = name if name and abs(factor) == 1 else f"{abs(factor)}{name}"
            sign = ("-" if factor < 0 else "") if not text else (" - " if factor < 0 else " + ")
            text += sign + size
    return text or "0"


def _ratio(value: Fraction) -> str:
    return (
        str(value.numerator) if value.denominator == 1 else f"{value.numerator}/{value.denominator}"
    )


def _nonzero(rng: Random, limit: int) -> int:
    return rng.choice([-1, 1]) * rng.randint(1, limit)


def _determinant(matrix: list[list[int]]) -> int:
    if len(matrix) == 1:
        return matrix[0][0]
    minors = [[row[:at] + row[at + 1 :] for row in matrix[1:]] for at in range(len(matrix))]
    return sum((-1) ** at * matrix[0][at] * _determinant(minor) for at, minor in enumerate(minors))
