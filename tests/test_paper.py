"""docs/paper.md names functions that exist and that a command or the public surface reaches."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.architecture import syntax_tree

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "paper.md").read_text()
PLACES = sorted(set(re.findall(r"`([\w/]+\.py): ([\w.]+)`", PAGE)))
SHOWN = ("toy", "real", "never run", "-")


def defined(file: Path) -> set[str]:
    """Functions, classes, methods and constants of a file, methods as Class.method."""
    names: set[str] = set()
    for node in syntax_tree(file).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{n.name}" for n in node.body if isinstance(n, ast.FunctionDef)}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


@cache
def imported(module: str) -> frozenset[str]:
    """Modules of the package that a module imports, lazily too, or names in a string."""
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return frozenset()
    found = set(re.findall(r"paddock(?:\.\w+)+", file.read_text()))
    for node in ast.walk(syntax_tree(file)):
        if isinstance(node, ast.ImportFrom):
            base = module if path.is_dir() else module.rpartition(".")[0]
            prefix = node.module or "" if node.level == 0 else f"{base}.{node.module or ''}"
            found |= {prefix.rstrip("."), *(f"{prefix.rstrip('.')}.{a.name}" for a in node.names)}
    return frozenset(name for name in found if name.startswith("paddock."))


@cache
def reached() -> frozenset[str]:
    """Modules reached from the commands and from every package's `__init__`."""
    todo = [
        "paddock.cli.__main__",
        *(f"paddock.{p.parent.name}" for p in ROOT.glob("paddock/*/__init__.py")),
    ]
    seen: set[str] = set()
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            todo += imported(module)
    return frozenset(seen)


@pytest.mark.parametrize(("file", "name"), PLACES)
def test_the_place_exists_and_is_reached(file, name):
    path = ROOT / "paddock" / file
    assert path.is_file(), f"docs/paper.md names paddock/{file}, which does not exist"
    assert name in defined(path), f"docs/paper.md names {name}, which paddock/{file} does not have"
    module = "paddock." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    assert module in reached(), f"no command and no public name reaches {module}"


def test_every_row_has_a_place_or_says_not_yet_and_what_it_was_shown_on():
    section, _, _ = PAGE.partition("## Where the paper is silent")
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in section.splitlines()
        if line.startswith("| ") and not line.startswith("| in the paper")
    ]
    assert len(rows) > 50
    assert [row for row in rows if len(row) != 3 or not row[2].rstrip(" |").startswith(SHOWN)] == []
    assert [row for row in rows if "`" not in row[1] and "not yet" not in row[1]] == []
