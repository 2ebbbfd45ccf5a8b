"""Programs against hidden tests. The program runs in a sandbox of its own and sees the arguments of
a call, never what is expected of it; what it returns is data, and is compared elsewhere: here, or
by code of the tests in a second sandbox."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paddock.envs.ask import Check
from paddock.envs.code.inside import encode
from paddock.envs.code.talk import MOST_BYTES, Line, LineError, SandboxLost
from paddock.envs.problems import Problem
from paddock.envs.rewards import Score
from paddock.envs.sandbox import Pool, SandboxError, SandboxSettings
from paddock.envs.world import Stopped

JUDGE_S = 60.0  # for the tests' own code, besides the answer's time


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

    def text(self) -> str:
        return json.dumps([self.cases, self.checks, self.entry, self.before, self.stub])

    @classmethod
    def of(cls, problem: Problem) -> "HiddenTests":
        cases, checks, entry, before, stub = json.loads(problem.hidden)
        pairs = tuple((given, right) for given, right in cases)
        return cls(cases=pairs, checks=tuple(checks), entry=entry, before=before, stub=stub)

    @property
    def count(self) -> int:
        return len(self.cases) + len(self.checks)

    def programs(self, answer: str) -> tuple[str, str]:
        """What an answer makes: what is run first, whatever comes of it, and the program.

        >>> tests = HiddenTests(entry="f", before="import math", stub="def f(x):")
        >>> tests.programs("    return x"), tests.programs("def f(x): return x")
        (('', 'def f(x):\\n    return x'), ('import math', 'def f(x): return x'))
        """
        whole = not self.stub or f"def {self.entry}(" in answer
        return (self.before, answer) if whole else ("", f"{self.stub}\n{answer}")


@dataclass(slots=True)
class Tally:
    """How many tests have passed, and the first complaint. `fatal`: the others cannot be run."""

    passed: int = 0
    complaint: str = ""
    fatal: bool = False

    def score(self, count: int, *, partly: bool) -> Score:
        share = min(1.0, max(0.0, self.passed / count))
        if share == 1:
            return Score(1.0)
        note = f"{count - self.passed} of {count} failed: {self.complaint}"
        return Score(share if partly else 0.0, self.complaint if self.fatal else note)


def by_tests(
    sandbox: SandboxSettings, *, seconds: float, partly: bool = False, warm: int = 1
) -> Check:
    """A check that runs the tests. All of them must pass, unless the share is wanted (`partly`).
    What a program does wrong, taking too long and breaking its sandbox included, is a bad score;
    where no sandbox can be had, or the tests fail by themselves, there is none."""
    limits = sandbox.limits.model_copy(update={"output_bytes": 4 * MOST_BYTES})
    pool = Pool(sandbox.model_copy(update={"limits": limits}), warm=warm)

    async def check(answer: str, problem: Problem) -> Score:
        tests, tally = HiddenTests.of(problem), Tally()
        async with pool.box() as box:
            try:
                await _graded(pool, Line(box, "answer", seconds), answer, tests, tally)
            except LineError as error:
                if isinstance(error, SandboxLost):
                    await _working(pool)
                tally.complaint, tally.fatal = str(error), True
        return tally.score(tests.count, partly=partly)

    return check


async def _working(pool: Pool) -> None:
    """Raises SandboxError where a sandbox that no answer has touched does not work either."""
    async with pool.box() as box:
        done = await box.exec([*box.python, "-c", ""])
        if not done.ok:
            raise SandboxError(f"Python does not run in a fresh sandbox: {done.stderr[-200:]}")


async def _graded(pool: Pool, line: Line, answer: str, tests: HiddenTests, tally: Tally) -> None:
    before, program = tests.programs(answer)
    if before:
        await line.ask({"do": ["run", before]})
    ran = await line.ask({"do": ["run", program]})
    if "error" in ran:
        tally.complaint = str(ran.get("text"))
        return
    await _compare(line, tests.entry, tests.cases, tally)
    if tests.checks:
        async with pool.box() as box:
            await _judge(Line(box, "judge", JUDGE_S), line, tests, tally)


async def _compare(
    line: Line, entry: str, cases: Sequence[tuple[list[Any], Any]], tally: Tally
) -> None:
    for given, right in cases:
        of, named = {"name": entry}, encode({}, _no_data)
        reply = await line.ask({"do": ["call", of, encode(given, _no_data), named]})
        # Both sides as they are encoded: the same type and the same value, by nobody's __eq__.
        if "value" in reply and reply["value"] == encode(right, _no_data):
            tally.passed += 1
        elif not tally.complaint:
            tally.complaint = str(reply.get("text") or "another result was expected")


def _no_data(value: Any) -> Any:
    raise TypeError(f"{value!r:.80} is no data")


async def _judge(judge: Line, line: Line, tests: HiddenTests, tally: Tally) -> None:
    """The checks, in a sandbox of their own, asking the answer for what they need of it."""
    work = {"entry": tests.entry, "before": tests.before, "checks": tests.checks}
    said, asked = await _heard(judge, work), False
    while "ask" in said:
        asked, tally.passed = True, said["passed"]
        said = await _heard(judge, await line.ask(said["ask"]))
    if "broken" not in said:
        tally.passed, tally.complaint = said["passed"], "".join(said["failed"])
    elif asked:
        tally.complaint, tally.fatal = f"its tests broke: {said['broken']}", True
    else:  # what has not yet heard of the answer breaks by itself
        raise Stopped("grader", "tests", f"the tests cannot be run: {said['broken']}")


async def _heard(judge: Line, message: dict[str, Any]) -> dict[str, Any]:
    try:
        return await judge.ask(message)
    except SandboxLost as error:
        raise Stopped("infrastructure", "tests", str(error)) from error
    except LineError as error:
        return {"broken": str(error)}
