"""Every exported name is used by another package, a benchmark, an example, or listed here."""

import ast
import importlib
from collections import defaultdict
from pathlib import Path

import pytest

import paddock
from tests.architecture import syntax_tree
from tests.test_glossary import PACKAGES, exported

ROOT = Path(paddock.__file__).parent
# Names that outside code relies on, beyond what the package itself uses.
RELIED_ON = {
    "checkpoint": ["load_pretrained", "save_pretrained"],
    "engine": ["Engine", "EngineSettings"],
    "envs": ["Env", "Tool"],  # base of an own environment, and its tools
    "launch": ["distill"],
    "model": ["GrowingCache", "KVCache"],
    "optim": ["AdamW", "LinearRampSchedule", "Muon", "PiecewiseConstantSchedule"],
    "parallel": ["MeshError"],
    "quant": [
        "QuantError",
        "QuantizationArgs",
        "int4",
        "load_quantized",
        "quantize",
        "rotate",
    ],
    "text": ["find_prefix_change"],
}


def used_names():
    """Names that files take from a package other than their own, by package."""
    used = defaultdict(set)
    for file in [
        f
        for top in ("paddock", "benchmarks", "examples")
        for f in (ROOT.parent / top).rglob("*.py")
    ]:
        own = file.relative_to(ROOT).parts[0] if file.is_relative_to(ROOT) else ""
        for node in ast.walk(syntax_tree(file)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paddock."):
                package = node.module.split(".")[1]
                if package != own:
                    used[package] |= {alias.name for alias in node.names}
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used[node.value.id].add(
                    node.attr
                )  # launch.train, after `from paddock import launch`
    return used


def test_every_exported_name_is_used():
    used = used_names()
    unused = {
        package: [
            n for n in exported(package) if n not in used[package] | set(RELIED_ON.get(package, []))
        ]
        for package in PACKAGES
    }
    assert {package: names for package, names in unused.items() if names} == {}


@pytest.mark.parametrize("package", sorted(RELIED_ON))
def test_what_outside_code_relies_on_is_there(package):
    module = importlib.import_module(f"paddock.{package}")
    assert [name for name in RELIED_ON[package] if not hasattr(module, name)] == []
