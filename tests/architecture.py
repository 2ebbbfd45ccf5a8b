"""The import rule between packages: the table is paddock's docstring, checked by syntax trees."""

import ast
import gc
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

TORCH = {"kernels", "parallel", "optim", "model", "checkpoint", "quant", "train", "engine", "rl"}
DATA = {"recipes", "py.typed"}  # what else is in the package's folder
RESTRICTED = {  # outside modules and calls, and the only places that may use them
    # launch and cli inside functions only: they must load without torch
    "torch": TORCH | {"launch", "bench", "cli"},
    "torch.cuda": {"kernels"},  # elsewhere torch.accelerator, so that other chips plug in
    "torch.utils.cpp_extension": {"kernels/*"},
    "triton": {"kernels/*"},  # in an op's folder, beside its reference
    # worker processes of verifiers, other Pythons, and a program that runs inside the sandbox
    "subprocess": {
        *{"sandbox", "launch", "cli", "envs/worker_pool.py", "envs/foreign", "envs/terminal"},
        "kernels/cpu",  # the C++ compiler
    },
    "os.environ": {"cli", "launch", "parallel"},
    "os.getenv": {"cli", "launch", "parallel"},
    "print": {"cli"},
    "argparse": set(),
}


def syntax_tree(file: Path) -> ast.Module:
    """Without garbage collection: in CPython 3.11 a finalizer that parses, or lets another thread
    parse, while a tree is built makes `ast.parse` raise SystemError."""
    gc.disable()
    try:
        return ast.parse(file.read_text())
    finally:
        gc.enable()


def import_table(doc: str) -> dict[str, set[str]]:
    """The packages of the table in `doc`, in order, each with the packages it may import.

    >>> import_table("records  data <-\\nserve  in <-> out  <- GROUND\\n\\nGROUND = records")
    {'records': set(), 'serve': {'records'}}
    """
    rows = [line.rpartition("<-") for line in doc.splitlines() if "<-" in line]
    ground = re.search(r"^GROUND = (.*)$", doc, re.MULTILINE)
    table: dict[str, set[str]] = {}
    for left, _, right in rows:
        groups = {"GROUND": set(ground[1].split()) if ground else set(), "EVERY": set(table)}
        names = right.split()
        table[left.split()[0]] = set().union(*(groups.get(name, {name}) for name in names))
    return table


def violations(root: Path, packages: dict[str, set[str]]) -> Iterator[str]:
    """Everything under `root` that the rule forbids, lazy imports included, with file and line."""
    for entry in sorted(root.iterdir()):
        if entry.name not in {*packages, *DATA, "__init__.py", "__main__.py", "__pycache__"}:
            yield f"{entry.name}: no package of the table has this name"
    for package, above in packages.items():
        for file in sorted((root / package).rglob("*.py")):
            where = file.relative_to(root).as_posix()
            names = _names(syntax_tree(file))
            allowed = above | {package, "__version__"}
            found = {
                (line, what) for line, name in names for what in _forbidden(name, where, allowed)
            }
            found |= {
                (line, f"import past '{name}'")
                for line, name in _deep(file, package)
                if name.removeprefix("paddock.") in allowed
            }
            for line, what in sorted(found):
                yield f"{where}:{line}: '{package}' may not {what}"


def _deep(file: Path, package: str) -> Iterator[tuple[int, str]]:
    """Imports past another package's `__init__`; an op of kernels is a surface of its own."""
    for node in ast.walk(syntax_tree(file)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            top, *rest = name.split(".")
            is_op = rest[:1] == ["kernels"] and len(rest) == 2
            if top == "paddock" and len(rest) > 1 and rest[0] != package and not is_op:
                yield node.lineno, f"paddock.{rest[0]}"


def _forbidden(name: str, where: str, allowed: set[str]) -> Iterator[str]:
    top, *rest = name.split(".")
    if not top:
        yield "reach out of its folder by a relative import"
    elif top == "paddock" and rest and rest[0] not in allowed:
        yield f"import '{rest[0]}'"
    for tool, places in RESTRICTED.items():
        used = name == tool or name.startswith(f"{tool}.")
        if used and not any(fnmatch(where, f"{place}/*") or where == place for place in places):
            yield f"use '{tool}'"


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
            case ast.Attribute(value=ast.Name(id=owner)) if f"{owner}.{node.attr}" in RESTRICTED:
                yield node.lineno, f"{owner}.{node.attr}"
            case ast.Name(id="print"):
                yield node.lineno, "print"


def listed(package: Path) -> set[str]:
    """The files and folders that a package's docstring names: the first word of each line at the
    margin, such as `loop.py` or `topk/`."""
    doc = ast.get_docstring(syntax_tree(package / "__init__.py")) or ""
    names = re.findall(r"^(\w+(?:\.\w+|/))(?=\s)", doc, re.MULTILINE)
    return {name.removesuffix("/") for name in names}


def present(package: Path) -> set[str]:
    """The files and folders that a package's docstring must name."""
    return {entry.name for entry in package.iterdir()} - {"__init__.py", "__pycache__"}
