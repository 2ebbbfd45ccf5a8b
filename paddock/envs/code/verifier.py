"""Verifier that runs a completion's program against hidden unit tests.

The program runs in its own sandbox and sees the arguments of a call, never the expected result.
What it returns is data and is compared elsewhere: here, or by test code in a second sandbox.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paddock.envs.code.channel import MAX_REPLY_BYTES, ChannelError, JsonLinesChannel, SandboxLost
from paddock.envs.code.sandboxed import encode
from paddock.envs.datasets import QAExample
from paddock.envs.env import RolloutFailed
from paddock.envs.qa import AnswerVerifier
from paddock.envs.rewards import RewardScore
from paddock.sandbox import SandboxError, SandboxPool, SandboxSettings

TESTS_TIMEOUT_S = 60.0  # for test code, in addition to the program's time


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenTests:
    """Unit tests that the policy does not see.

    `cases` are arguments and results of the function `entry`; `checks` are snippets that raise if
    they fail. `before` is code that runs before a program that defines `entry`, and before the
    checks. `stub` is prepended to a program that does not define `entry` but only has its body.
    """

    cases: tuple[tuple[list[Any], Any], ...] = ()
    checks: tuple[str, ...] = ()
    entry: str = ""
    before: str = ""
    stub: str = ""

    def to_json(self) -> str:
        return json.dumps([self.cases, self.checks, self.entry, self.before, self.stub])

    @classmethod
    def from_example(cls, problem: QAExample) -> "HiddenTests":
        cases, checks, entry, before, stub = json.loads(problem.hidden)
        pairs = tuple((arguments, result) for arguments, result in cases)
        return cls(cases=pairs, checks=tuple(checks), entry=entry, before=before, stub=stub)

    @property
    def count(self) -> int:
        return len(self.cases) + len(self.checks)

    def build_programs(self, answer: str) -> tuple[str, str]:
        """Code to run first, whose errors are ignored, and the program of a completion.

        >>> tests = HiddenTests(entry="f", before="import math", stub="def f(x):")
        >>> tests.build_programs("    return x"), tests.build_programs("def f(x): return x")
        (('', 'def f(x):\\n    return x'), ('import math', 'def f(x): return x'))
        """
        complete = not self.stub or f"def {self.entry}(" in answer
        return (self.before, answer) if complete else ("", f"{self.stub}\n{answer}")


@dataclass(slots=True)
class UnitTestResults:
    """Number of passed tests and the first error. `fatal`: the remaining tests cannot run."""

    passed: int = 0
    error: str = ""
    fatal: bool = False

    def score(self, count: int, *, partial_credit: bool) -> RewardScore:
        share = min(1.0, max(0.0, self.passed / count))
        if share == 1:
            return RewardScore(1.0)
        note = f"{count - self.passed} of {count} failed: {self.error}"
        return RewardScore(share if partial_credit else 0.0, self.error if self.fatal else note)


def make_test_verifier(
    sandbox: SandboxSettings, *, seconds: float, partial_credit: bool = False, warm: int = 1
) -> AnswerVerifier:
    """A verifier that runs the hidden tests of an example.

    All tests must pass, or with `partial_credit` the score is the share that does. Errors, timeouts
    and a sandbox broken by the program lower the score. If no sandbox works, or the tests fail by
    themselves, the verifier raises: there is no score.
    """
    limits = sandbox.limits.model_copy(update={"max_output_bytes": 4 * MAX_REPLY_BYTES})
    pool = SandboxPool(sandbox.model_copy(update={"limits": limits}), warm=warm)

    async def verify(answer: str, problem: QAExample) -> RewardScore:
        tests, results = HiddenTests.from_example(problem), UnitTestResults()
        async with pool.sandbox() as box:
            try:
                solution = JsonLinesChannel(box, "solution", seconds)
                await _run_tests(pool, solution, answer, tests, results)
            except ChannelError as error:
                if isinstance(error, SandboxLost):
                    await _require_working_sandbox(pool)
                results.error, results.fatal = str(error), True
        return results.score(tests.count, partial_credit=partial_credit)

    return verify


async def _require_working_sandbox(pool: SandboxPool) -> None:
    """Raises SandboxError if a fresh sandbox does not work either."""
    async with pool.sandbox() as box:
        done = await box.exec([*box.python, "-c", ""])
        if not done.ok:
            raise SandboxError(f"Python does not run in a fresh sandbox: {done.stderr[-200:]}")


async def _run_tests(
    pool: SandboxPool,
    solution: JsonLinesChannel,
    answer: str,
    tests: HiddenTests,
    results: UnitTestResults,
) -> None:
    before, program = tests.build_programs(answer)
    if before:
        await solution.request({"do": ["run", before]})
    ran = await solution.request({"do": ["run", program]})
    if "error" in ran:
        results.error = str(ran.get("text"))
        return
    await _run_cases(solution, tests.entry, tests.cases, results)
    if tests.checks:
        async with pool.sandbox() as box:
            runner = JsonLinesChannel(box, "tests", TESTS_TIMEOUT_S)
            await _run_checks(runner, solution, tests, results)


async def _run_cases(
    solution: JsonLinesChannel,
    entry: str,
    cases: Sequence[tuple[list[Any], Any]],
    results: UnitTestResults,
) -> None:
    for arguments, expected in cases:
        function, keywords = {"name": entry}, encode({}, _reject_object)
        call = ["call", function, encode(arguments, _reject_object), keywords]
        reply = await solution.request({"do": call})
        # Encoded values are compared: same type and same value, without the program's __eq__.
        if "value" in reply and reply["value"] == encode(expected, _reject_object):
            results.passed += 1
        elif not results.error:
            results.error = str(reply.get("text") or "another result was expected")


def _reject_object(value: Any) -> Any:
    raise TypeError(f"arguments and results must be plain data, got {value!r:.80}")


async def _run_checks(
    runner: JsonLinesChannel,
    solution: JsonLinesChannel,
    tests: HiddenTests,
    results: UnitTestResults,
) -> None:
    """Run the checks in their own sandbox and relay their requests to the program."""
    message = {"entry": tests.entry, "before": tests.before, "checks": tests.checks}
    reply, used_solution = await _request(runner, message), False
    while "ask" in reply:
        used_solution, results.passed = True, reply["passed"]
        reply = await _request(runner, await solution.request(reply["ask"]))
    if "broken" not in reply:
        results.passed, results.error = reply["passed"], "".join(reply["failed"])
    elif used_solution:
        results.error, results.fatal = f"its tests broke: {reply['broken']}", True
    else:  # the program had no part in it
        raise RolloutFailed("grader", "tests", f"the tests cannot be run: {reply['broken']}")


async def _request(runner: JsonLinesChannel, message: dict[str, Any]) -> dict[str, Any]:
    try:
        return await runner.request(message)
    except SandboxLost as error:
        raise RolloutFailed("infrastructure", "tests", str(error)) from error
    except ChannelError as error:
        return {"broken": str(error)}
