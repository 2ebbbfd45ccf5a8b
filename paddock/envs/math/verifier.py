"""Whether two mathematical answers are the same.

Most pairs are settled by plain rules, here and at once. What those leave open goes to math-verify
in a worker. It evaluates what it reads, so an answer can keep it busy for ever: one whose numbers
are huge is not evaluated at all, and one that uses up a call's time or memory, or makes it fail, is
wrong if the right answer by itself does not.
"""

from importlib.util import find_spec
from typing import Any

from paddock.envs.answer_format import answers_match
from paddock.envs.datasets import QAExample
from paddock.envs.math.size_bound import is_too_large
from paddock.envs.qa import AnswerVerifier
from paddock.envs.registry import EnvError
from paddock.envs.rewards import RewardScore
from paddock.envs.worker_pool import shared_pool

_LONGEST = 2000  # characters of an answer that is looked at; the rest is no answer but an essay


def make_math_verifier(*, count: int = 1, seconds: float = 10.0) -> AnswerVerifier:
    """A check that knows algebra: \\frac{1}{2} is 0.5, (x+1)^2 is x^2+2x+1, {1,2} is {2,1}."""
    if not find_spec("math_verify"):
        raise EnvError("math-verify is not installed: pip install 'paddock[worlds]'")
    here = "paddock.envs.math.verifier"
    workers = shared_pool(f"{here}:answers_equal", count=count, preload=f"{here}:warm_up")

    async def check(answer: str, problem: QAExample) -> RewardScore:
        right = problem.answer
        if len(answer) > _LONGEST:
            return RewardScore(0.0, f"an answer of {len(answer)} characters")
        plainly = answers_match(answer, right)
        if plainly is not None:
            return RewardScore(float(plainly))
        if is_too_large(answer):
            return RewardScore(0.0, "an answer with numbers too large to compare")
        found = await workers.call_with_control(
            right, answer, control=(right, "0"), seconds=seconds
        )
        return (
            RewardScore(0.0, "an answer that cannot be compared")
            if found is None
            else RewardScore(found)
        )

    return check


def answers_equal(right: str, said: str) -> bool:
    """Runs in a worker. What cannot be read as mathematics equals nothing."""
    found = [_read(right), _read(said)]
    if not all(found):
        return False
    from math_verify import verify

    # Its own clock works by signals that wait for Python; the worker's kills the process.
    return bool(verify(*found, timeout_seconds=None, raise_on_error=True))


def warm_up() -> None:
    """Runs in a worker: the first comparison builds tables, which takes a second or more."""
    answers_equal("(x+1)^2", "x^2+2x+1")


def _read(text: str) -> list[Any]:
    from math_verify import parse

    found: list[Any] = parse(f"\\boxed{{{text}}}", parsing_timeout=None)
    return found
