"""GPU code on machines without a GPU: modules import, tests collect, kernel names exist."""

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paddock.kernels.dispatch import KERNELS, has_triton
from tests.architecture import syntax_tree

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for pattern in ("triton*.py", "gluon*.py", "cuda.py", "fused.py", "packed.py")
    for file in (ROOT / "paddock" / "kernels").rglob(pattern)
)


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
@pytest.mark.parametrize("module", MODULES)
def test_gpu_modules_import(module):
    importlib.import_module(module)


def test_gpu_tests_collect():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "-n", "0"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "tests"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_kernel_switches_are_known():
    calls = re.compile(r"(?:can_use_kernel|is_enabled|suits)\(\s*\"(\w+)\"")
    used = {
        name
        for file in (ROOT / "paddock").rglob("*.py")
        for name in calls.findall(file.read_text())
    }
    assert used == set(KERNELS)


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
@pytest.mark.parametrize("module", [name for name in MODULES if name.endswith(("fused", "packed"))])
def test_kernels_that_dispatch_imports_exist(module):
    """Imports inside functions run only on a GPU: check their names, and what is used of them."""
    package = module.rpartition(".")[0]
    tree = syntax_tree(Path(importlib.import_module(module).__file__))
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        source = importlib.import_module("." * node.level + (node.module or ""), package)
        for imported in node.names:
            if not hasattr(source, imported.name):
                importlib.import_module(f"{source.__name__}.{imported.name}")
            if imported.asname == "kernels":
                kernels = importlib.import_module(f"{source.__name__}.{imported.name}")
                used = {
                    user.attr
                    for user in ast.walk(tree)
                    if isinstance(user, ast.Attribute)
                    and isinstance(user.value, ast.Name)
                    and user.value.id == "kernels"
                }
                assert not {name for name in used if not hasattr(kernels, name)}
