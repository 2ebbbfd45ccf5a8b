"""The law of the house: the table is paddock's own docstring, the evidence its syntax trees."""

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

TORCH = {"kernels", "parallel", "optim", "model", "checkpoint", "quant", "train", "engine", "rl"}
DOORS = {  # what leads out of the house, and the only places that may open it
    "torch": TORCH | {"cli"},  # cli inside its verbs only: it must load without torch
    "torch.cuda": {"kernels"},  # elsewhere torch.accelerator, so that other chips plug in
    "torch.utils.cpp_extension": {"kernels/*"},
    "triton": {"kernels/*"},  # in an op's folder, beside its reference
    "subprocess": {"envs", "cli"},
    "os.environ": {"cli", "parallel"},
    "os.getenv": {"cli", "parallel"},
    "print": {"cli"},
    "argparse": set(),
}


def house(doc: str) -> dict[str, set[str]]:
    """The rooms of the table in `doc`, in order, each with the rooms it may import.

    >>> house("den  cosy <-\\nhall  in <-> out  <- GROUND\\n\\nGROUND = den")
    {'den': set(), 'hall': {'den'}}
    """
    rows = [line.rpartition("<-") for line in doc.splitlines() if "<-" in line]
    arrows = {left.split()[0]: set(right.split()) for left, _, right in rows}
    ground = re.search(r"^GROUND = (.*)$", doc, re.MULTILINE)
    groups = {"GROUND": set(ground[1].split()) if ground else set(), "EVERY": set(arrows)}
    return {
        room: set().union(*(groups.get(name, {name}) for name in names)) - {room}
        for room, names in arrows.items()
    }


def breaches(root: Path, rooms: dict[str, set[str]]) -> Iterator[str]:
    """Everything under `root` that the law forbids, lazy imports included, with file and line."""
    for entry in sorted(root.iterdir()):
        if entry.name not in {*rooms, "__init__.py", "__main__.py", "__pycache__"}:
            yield f"{entry.name}: no room has this name"
    for room, above in rooms.items():
        for file in sorted((root / room).rglob("*.py")):
            where = file.relative_to(root).as_posix()
            names = _names(ast.parse(file.read_text()))
            allowed = above | {room, "__version__"}
            crimes = {
                (line, crime) for line, name in names for crime in _crimes(name, where, allowed)
            }
            for line, crime in sorted(crimes):
                yield f"{where}:{line}: '{room}' may not {crime}"


def _crimes(name: str, where: str, allowed: set[str]) -> Iterator[str]:
    top, *rest = name.split(".")
    if not top:
        yield "reach out of its folder by a relative import"
    elif top == "paddock" and rest and rest[0] not in allowed:
        yield f"import '{rest[0]}'"
    for door, places in DOORS.items():
        through = name == door or name.startswith(f"{door}.")
        if through and not any(fnmatch(where, f"{place}/*") for place in places):
            yield f"use '{door}'"


def _names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The dotted names a file takes from elsewhere; one taken by '..' begins with a dot."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom(level=0):
                yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
            case ast.ImportFrom(level=level) if level > 1:
                yield node.lineno, f".{node.module or ''}"
            case ast.Attribute(value=ast.Name(id=owner)) if f"{owner}.{node.attr}" in DOORS:
                yield node.lineno, f"{owner}.{node.attr}"
            case ast.Name(id="print"):
                yield node.lineno, "print"


def listed(room: Path) -> set[str]:
    """The files and folders that a room's docstring names: the first word of each line at the
    margin below the opening sentence."""
    doc = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    rows = [line for line in doc.splitlines()[1:] if line and not line[0].isspace()]
    return {row.split()[0].removesuffix("/") for row in rows}


def present(room: Path) -> set[str]:
    """The files and folders that a room's docstring must name."""
    return {entry.name for entry in room.iterdir()} - {"__init__.py", "__pycache__"}
