"""Equality of two mathematical answers.

Most pairs are decided by plain rules in this process. The others go to math-verify in a worker. It
evaluates what it parses, so an answer could keep it busy for ever: answers with huge numbers are
not evaluated, and one that exceeds a call's time or memory, or makes it fail, is wrong if the
reference answer alone does not fail too.
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

_MAX_CHARS = 2000  # longer answers are not compared


def make_math_verifier(*, count: int = 1, seconds: float = 10.0) -> AnswerVerifier:
    """A symbolic verifier: \\frac{1}{2} equals 0.5, (x+1)^2 equals x^2+2x+1, {1,2} equals {2,1}."""
    if not find_spec("math_verify"):
        raise EnvError("math-verify is not installed: pip install 'paddock[envs]'")
    here = "paddock.envs.math.verifier"
    workers = shared_pool(f"{here}:answers_equal", count=count, preload=(f"{here}:warm_up",))

    async def verify(answer: str, problem: QAExample) -> RewardScore:
        right = problem.answer
        if len(answer) > _MAX_CHARS:
            return RewardScore(0.0, f"an answer of {len(answer)} characters")
        matches = answers_match(answer, right)
        if matches is not None:
            return RewardScore(float(matches))
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

    return verify


def answers_equal(right: str, answer: str) -> bool:
    """Runs in a worker. Text that cannot be parsed as mathematics equals nothing."""
    found = [_parse(right), _parse(answer)]
    if not all(found):
        return False
    from math_verify import verify

    # math-verify's own timeout uses signals that wait for Python; the worker's kills the process.
    return bool(verify(*found, timeout_seconds=None, raise_on_error=True))


def warm_up() -> None:
    """Runs in a worker: the first comparison builds tables, which takes a second or more."""
    answers_equal("(x+1)^2", "x^2+2x+1")


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    found: list[Any] = parse(f"\\boxed{{{text}}}", parsing_timeout=None)
    return found
