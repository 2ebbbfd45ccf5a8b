"""A program: runs inside a sandbox, where this package is not. Reads an answer and its tests from
standard input, runs them, and says the word it was given and what each test complained about."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def main() -> None:
    work = json.load(sys.stdin)
    out = os.dup(1)
    os.dup2(2, 1)  # what the program prints is not our report
    complaints = _run(work["program"], work["checks"])
    os.write(out, f"{work['word']}{json.dumps(complaints)}\n".encode())
    os._exit(0)  # whatever threads and exit hooks the program has left behind


def _run(program: str, checks: list[str]) -> list[str]:
    names: dict[str, Any] = {"__name__": "answer"}
    same = _sameness()
    wrong = _tried(program, names)
    names["same"] = same
    return [wrong or _tried(check, names) for check in checks]


def _sameness() -> Callable[[Any, Any], bool]:
    """Equality that an answer cannot redefine: lists, texts and numbers of these very types. What
    it uses is taken before the program runs and can change it."""
    kind, length, every, pairs, listed = type, len, all, zip, list

    def same(found: Any, right: Any) -> bool:
        if kind(found) is not kind(right):
            return False
        if kind(right) is not listed:
            return bool(found == right)
        return length(found) == length(right) and every(same(*pair) for pair in pairs(found, right))

    return same


def _tried(code: str, names: dict[str, Any]) -> str:
    try:
        exec(compile(code, "<answer>", "exec"), names)
    except BaseException as error:  # SystemExit is a complaint, too
        return f"{type(error).__name__}: {error}"[:300]
    return ""


if __name__ == "__main__":
    main()
