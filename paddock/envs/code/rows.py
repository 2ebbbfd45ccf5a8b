"""Rows of HumanEval and MBPP files."""

import ast

from paddock.envs.code.verifier import HiddenTests
from paddock.envs.datasets import QAExample
from paddock.envs.jsonl import JsonRow, RowError


def parse_row(row: JsonRow) -> QAExample:
    """A problem from a row of either format. Raises RowError if a field is missing or wrong.

    HumanEval  {"prompt", "entry_point", "test", "canonical_solution"}
    MBPP       {"text" or "prompt", "code", "test_list", "test_setup_code" or "test_imports",
               "challenge_test_list"}
    """
    return _humaneval(row) if "entry_point" in row.fields else _mbpp(row)


def _humaneval(row: JsonRow) -> QAExample:
    prompt, entry = row.get_text("prompt"), row.get_text("entry_point")
    before, found, _ = prompt.rpartition(f"def {entry}(")
    if not found:
        raise RowError(
            f"{row.where}: 'prompt' does not contain the function {entry!r} of 'entry_point'"
        )
    test = f"{row.get_text('test')}\ncheck({entry})"
    tests = HiddenTests(checks=(test,), entry=entry, before=before, stub=prompt)
    return QAExample(
        question=f"Complete this Python function.\n\n```python\n{prompt.rstrip()}\n```",
        answer=prompt + row.get_text("canonical_solution"),
        hidden=tests.to_json(),
    )


def _mbpp(row: JsonRow) -> QAExample:
    checks = row.get_texts("test_list") + row.get_texts("challenge_test_list")
    if not checks:
        raise RowError(f"{row.where}: 'test_list' is missing or empty")
    before = "\n".join(row.get_texts("test_imports"))
    if "test_setup_code" in row.fields:
        before = row.get_text("test_setup_code")
    entry = _tested_function(row.get_text("code"), checks[0])
    shown = f"It must pass this test, and others like it:\n\n```python\n{checks[0]}\n```"
    return QAExample(
        question=f"{row.get_text('text', 'prompt').strip()}\n\n{shown}",
        answer=row.get_text("code"),
        hidden=HiddenTests(checks=checks, entry=entry, before=before).to_json(),
    )


def _tested_function(solution: str, check: str) -> str:
    """Name of the solution's function that a check calls; it may shadow a builtin.

    >>> source = "def half(n): return n / 2\\ndef sum(a): return half(a)"
    >>> _tested_function(source, "assert sum(4) == 2")
    'sum'
    """
    try:
        used = {node.id for node in ast.walk(ast.parse(check)) if isinstance(node, ast.Name)}
        body = ast.parse(solution).body
    except SyntaxError:
        return ""
    defined = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    return next((name for name in reversed(defined) if name in used), "")
