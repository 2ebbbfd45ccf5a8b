"""Problems in the layouts of HumanEval and MBPP."""

from paddock.envs.code.grade import HiddenTests
from paddock.envs.problems import Problem
from paddock.envs.rows import Row, RowError


def problem(row: Row) -> Problem:
    """A problem of either layout.

    HumanEval  {"prompt", "entry_point", "test", "canonical_solution"}
    MBPP       {"text" or "prompt", "code", "test_list", "test_setup_code" or "test_imports",
               "challenge_test_list"}
    """
    return _humaneval(row) if "entry_point" in row.fields else _mbpp(row)


def _humaneval(row: Row) -> Problem:
    prompt, entry = row.text("prompt"), row.text("entry_point")
    before, found, _ = prompt.rpartition(f"def {entry}(")
    if not found:
        raise RowError(f"{row.where}: 'prompt' does not begin {entry!r}, its entry_point")
    test = f"{row.text('test')}\ncheck({entry})"
    tests = HiddenTests(checks=(test,), entry=entry, before=before, stub=prompt)
    return Problem(
        question=f"Complete this Python function.\n\n```python\n{prompt.rstrip()}\n```",
        answer=prompt + row.text("canonical_solution"),
        hidden=tests.text(),
    )


def _mbpp(row: Row) -> Problem:
    checks = row.texts("test_list") + row.texts("challenge_test_list")
    if not checks:
        raise RowError(f"{row.where}: 'test_list' is missing or empty")
    before = "\n".join(row.texts("test_imports"))
    if "test_setup_code" in row.fields:
        before = row.text("test_setup_code")
    shown = f"It must pass this test, and others like it:\n\n```python\n{checks[0]}\n```"
    return Problem(
        question=f"{row.text('text', 'prompt').strip()}\n\n{shown}",
        answer=row.text("code"),
        hidden=HiddenTests(checks=checks, before=before).text(),
    )
