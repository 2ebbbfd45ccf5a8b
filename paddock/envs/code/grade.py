"""Programs against hidden tests, in a sandbox of their own."""

import json
import secrets
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from paddock.envs.ask import Check
from paddock.envs.problems import Problem
from paddock.envs.rewards import Score
from paddock.envs.sandbox import Pool, SandboxSettings

RUNNER = Path(__file__).with_name("inside.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenTests:
    """What is hidden from the solver: pieces of code, each of which raises if it fails. `before` is
    what stands in front of a program that defines `entry`, `stub` in front of one that does not and
    only goes on with the body."""

    checks: tuple[str, ...]
    entry: str = ""
    before: str = ""
    stub: str = ""

    def text(self) -> str:
        return json.dumps([self.checks, self.entry, self.before, self.stub])

    @classmethod
    def of(cls, problem: Problem) -> "HiddenTests":
        checks, entry, before, stub = json.loads(problem.hidden)
        return cls(checks=tuple(checks), entry=entry, before=before, stub=stub)

    def program(self, answer: str) -> str:
        """The whole program that an answer makes.

        >>> tests = HiddenTests(checks=(), entry="f", before="import math", stub="def f(x):")
        >>> tests.program("    return x"), tests.program("def f(x): return x")
        ('def f(x):\\n    return x', 'import math\\ndef f(x): return x')
        """
        whole = not self.stub or f"def {self.entry}(" in answer
        front = self.before if whole else self.stub
        return f"{front}\n{answer}" if front else answer


def by_tests(
    sandbox: SandboxSettings, *, seconds: float, partly: bool = False, warm: int = 1
) -> Check:
    """A check that runs the tests. All of them must pass, unless the share is wanted (`partly`).
    What a program does wrong, taking too long included, is a bad score; a sandbox that breaks has
    none."""
    pool = Pool(sandbox, warm=warm)

    async def check(answer: str, problem: Problem) -> Score:
        tests = HiddenTests.of(problem)
        # The program is not told this word, so it cannot say it before the tests have run.
        word = secrets.token_hex(16)
        work = {"word": word, "program": tests.program(answer), "checks": tests.checks}
        async with pool.box() as box:
            command = [*box.python, "-I", "-c", _runner()]
            done = await box.exec(command, stdin=json.dumps(work).encode(), timeout_s=seconds)
        if done.timed_out:
            return Score(0.0, f"over {seconds:g} s")
        passed, note = _passed(done.stdout, word, len(tests.checks))
        share = passed / len(tests.checks)
        return Score(share if partly else float(share == 1), note)

    return check


def _passed(output: str, word: str, count: int) -> tuple[int, str]:
    """How many tests passed, and what the first that did not complained about."""
    _, found, report = output.rpartition(word)
    if not found:
        return 0, "the program ended before its tests did"
    failed, _, first = report.splitlines()[0].partition(" ")
    return count - int(failed), f"{failed} of {count} failed: {first}" if int(failed) else ""


@cache
def _runner() -> str:
    return RUNNER.read_text()
