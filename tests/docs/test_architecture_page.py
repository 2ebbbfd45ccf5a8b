"""docs/architecture.md follows a request and a rollout through functions that exist."""

import ast
import re
from pathlib import Path

import pytest

from tests.architecture import syntax_tree

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
STEP = re.compile(
    r"^\d+\. `([\w/]+\.py): ([\w.]+)` (.*?)(?=^\d+\. |^#|\Z)", re.MULTILINE | re.DOTALL
)
STEPS = [(file, name, re.findall(r"`(\w+)`", rest)) for file, name, rest in STEP.findall(PAGE)]


def function(file, name):
    """The syntax tree of a function or method of the package."""
    body = syntax_tree(ROOT / "paddock" / file).body
    for part in name.split("."):
        found = [node for node in body if getattr(node, "name", None) == part]
        assert found, f"docs/architecture.md names {name}, which paddock/{file} does not have"
        node = found[-1]
        body = node.body
    return node


def called(tree):
    """Names that are called or passed on anywhere in a function."""
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return names | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def test_the_page_follows_a_request_and_a_rollout():
    assert len(STEPS) >= 16


@pytest.mark.parametrize(("file", "name", "calls"), STEPS, ids=[name for _, name, _ in STEPS])
def test_a_step_exists_and_calls_what_the_page_says(file, name, calls):
    assert set(calls) <= called(function(file, name))
