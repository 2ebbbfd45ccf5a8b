"""docs/paper.md names files and functions; they exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLACES = re.findall(r"`([\w/]+\.py): ([\w.]+)`", (ROOT / "docs" / "paper.md").read_text())


def defined(file: Path) -> set[str]:
    """Functions, classes, methods and constants of a file, methods as Class.method."""
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{n.name}" for n in node.body if isinstance(n, ast.FunctionDef)}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize(("file", "name"), sorted(set(PLACES)))
def test_the_place_exists(file, name):
    path = ROOT / "paddock" / file
    assert path.is_file(), f"docs/paper.md names paddock/{file}, which does not exist"
    assert name in defined(path), f"docs/paper.md names {name}, which paddock/{file} does not have"


def test_every_row_has_a_place_or_says_not_yet():
    rows = [
        line
        for line in (ROOT / "docs" / "paper.md").read_text().splitlines()
        if line.startswith("|") and not set(line) <= set("|- ") and "in the paper" not in line
    ]
    silent = [
        row for row in rows if "`" not in row and "not yet" not in row and "question" not in row
    ]
    assert rows
    assert silent == []
