"""Programs against hidden tests. The program runs in a sandbox of its own and sees the arguments of
a call, never what is expected of it; what it returns is data, and is compared elsewhere: here, or
by code of the tests in a second sandbox."""

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

TESTS_TIMEOUT_S = 60.0  # for the tests' own code, besides the answer's time


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenTests:
    """What is hidden from the solver: `cases` of arguments and result for the function `entry`, or
    `checks`, pieces of code each of which raises if it fails. `before` is what stands in front of a
    program that defines `entry` and in front of the checks, `stub` in front of a program that does
    not and only goes on with the body."""

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
        pairs = tuple((given, right) for given, right in cases)
        return cls(cases=pairs, checks=tuple(checks), entry=entry, before=before, stub=stub)

    @property
    def count(self) -> int:
        return len(self.cases) + len(self.checks)

    def build_programs(self, answer: str) -> tuple[str, str]:
        """What an answer makes: what is run first, whatever comes of it, and the program.

        >>> tests = HiddenTests(entry="f", before="import math", stub="def f(x):")
        >>> tests.build_programs("    return x"), tests.build_programs("def f(x): return x")
        (('', 'def f(x):\\n    return x'), ('import math', 'def f(x): return x'))
        """
        whole = not self.stub or f"def {self.entry}(" in answer
        return (self.before, answer) if whole else ("", f"{self.stub}\n{answer}")


@dataclass(slots=True)
class UnitTestResults:
    """How many tests have passed, and the first complaint. `fatal`: the others cannot be run."""

    passed: int = 0
    complaint: str = ""
    fatal: bool = False

    def score(self, count: int, *, partly: bool) -> RewardScore:
        share = min(1.0, max(0.0, self.passed / count))
        if share == 1:
            return RewardScore(1.0)
        note = f"{count - self.passed} of {count} failed: {self.complaint}"
        return RewardScore(share if partly else 0.0, self.complaint if self.fatal else note)


def make_test_verifier(
    sandbox: SandboxSettings, *, seconds: float, partly: bool = False, warm: int = 1
) -> AnswerVerifier:
    """A check that runs the tests. All of them must pass, unless the share is wanted (`partly`).
    What a program does wrong, taking too long and breaking its sandbox included, is a bad score;
    where no sandbox can be had, or the tests fail by themselves, there is none."""
    limits = sandbox.limits.model_copy(update={"max_output_bytes": 4 * MAX_REPLY_BYTES})
    pool = SandboxPool(sandbox.model_copy(update={"limits": limits}), warm=warm)

    async def check(answer: str, problem: QAExample) -> RewardScore:
        tests, tally = HiddenTests.from_example(problem), UnitTestResults()
        async with pool.sandbox() as box:
            try:
                await _graded(pool, JsonLinesChannel(box, "answer", seconds), answer, tests, tally)
            except ChannelError as error:
                if isinstance(error, SandboxLost):
                    await _working(pool)
                tally.complaint, tally.fatal = str(error), True
        return tally.score(tests.count, partly=partly)

    return check


async def _working(pool: SandboxPool) -> None:
    """Raises SandboxError where a sandbox that no answer has touched does not work either."""
    async with pool.sandbox() as box:
        done = await box.exec([*box.python, "-c", ""])
        if not done.ok:
            raise SandboxError(f"Python does not run in a fresh sandbox: {done.stderr[-200:]}")


async def _graded(
    pool: SandboxPool,
    line: JsonLinesChannel,
    answer: str,
    tests: HiddenTests,
    tally: UnitTestResults,
) -> None:
    before, program = tests.build_programs(answer)
    if before:
        await line.request({"do": ["run", before]})
    ran = await line.request({"do": ["run", program]})
    if "error" in ran:
        tally.complaint = str(ran.get("text"))
        return
    await _compare(line, tests.entry, tests.cases, tally)
    if tests.checks:
        async with pool.sandbox() as box:
            await _judge(JsonLinesChannel(box, "judge", TESTS_TIMEOUT_S), line, tests, tally)


async def _compare(
    line: JsonLinesChannel,
    entry: str,
    cases: Sequence[tuple[list[Any], Any]],
    tally: UnitTestResults,
) -> None:
    for given, right in cases:
        of, named = {"name": entry}, encode({}, _no_data)
        reply = await line.request({"do": ["call", of, encode(given, _no_data), named]})
        # Both sides as they are encoded: the same type and the same value, by nobody's __eq__.
        if "value" in reply and reply["value"] == encode(right, _no_data):
            tally.passed += 1
        elif not tally.complaint:
            tally.complaint = str(reply.get("text") or "another result was expected")


def _no_data(value: Any) -> Any:
    raise TypeError(f"{value!r:.80} is no data")


async def _judge(
    judge: JsonLinesChannel, line: JsonLinesChannel, tests: HiddenTests, tally: UnitTestResults
) -> None:
    """The checks, in a sandbox of their own, asking the answer for what they need of it."""
    work = {"entry": tests.entry, "before": tests.before, "checks": tests.checks}
    said, asked = await _heard(judge, work), False
    while "ask" in said:
        asked, tally.passed = True, said["passed"]
        said = await _heard(judge, await line.request(said["ask"]))
    if "broken" not in said:
        tally.passed, tally.complaint = said["passed"], "".join(said["failed"])
    elif asked:
        tally.complaint, tally.fatal = f"its tests broke: {said['broken']}", True
    else:  # what has not yet heard of the answer breaks by itself
        raise RolloutFailed("grader", "tests", f"the tests cannot be run: {said['broken']}")


async def _heard(judge: JsonLinesChannel, message: dict[str, Any]) -> dict[str, Any]:
    try:
        return await judge.request(message)
    except SandboxLost as error:
        raise RolloutFailed("infrastructure", "tests", str(error)) from error
    except ChannelError as error:
        return {"broken": str(error)}
