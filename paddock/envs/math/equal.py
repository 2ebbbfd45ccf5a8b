"""Whether two mathematical answers are the same.

Most pairs are settled by plain rules, here and at once. What those leave open goes to math-verify
in a worker. It evaluates what it reads, so an answer can keep it busy for ever: one whose numbers
are huge is not evaluated at all, and one that uses up a call's time or memory, or makes it fail, is
wrong if the right answer by itself does not.
"""

from importlib.util import find_spec
from typing import Any

from paddock.envs.answers import same
from paddock.envs.ask import Check
from paddock.envs.math.size import too_large
from paddock.envs.problems import Problem
from paddock.envs.registry import WorldError
from paddock.envs.rewards import Score
from paddock.envs.worker import shared

_LONGEST = 2000  # characters of an answer that is looked at; the rest is no answer but an essay


def by_algebra(*, count: int = 1, seconds: float = 10.0) -> Check:
    """A check that knows algebra: \\frac{1}{2} is 0.5, (x+1)^2 is x^2+2x+1, {1,2} is {2,1}."""
    if not find_spec("math_verify"):
        raise WorldError("math-verify is not installed: pip install 'paddock[worlds]'")
    here = "paddock.envs.math.equal"
    workers = shared(f"{here}:equal", count=count, preload=f"{here}:warm")

    async def check(answer: str, problem: Problem) -> Score:
        right = problem.answer
        if len(answer) > _LONGEST:
            return Score(0.0, f"an answer of {len(answer)} characters")
        plainly = same(answer, right)
        if plainly is not None:
            return Score(float(plainly))
        if too_large(answer):
            return Score(0.0, "an answer with numbers too large to compare")
        found = await workers.compare(right, answer, control=(right, "0"), seconds=seconds)
        return Score(0.0, "an answer that cannot be compared") if found is None else Score(found)

    return check


def equal(right: str, said: str) -> bool:
    """Runs in a worker. What cannot be read as mathematics equals nothing."""
    found = [_read(right), _read(said)]
    if not all(found):
        return False
    from math_verify import verify

    # Its own clock works by signals that wait for Python; the worker's kills the process.
    return bool(verify(*found, timeout_seconds=None, raise_on_error=True))


def warm() -> None:
    """Runs in a worker: the first comparison builds tables, which takes a second or more."""
    equal("(x+1)^2", "x^2+2x+1")


def _read(text: str) -> list[Any]:
    from math_verify import parse

    found: list[Any] = parse(f"\\boxed{{{text}}}", parsing_timeout=None)
    return found
