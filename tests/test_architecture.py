import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import paddock
from tests.architecture import (
    RESTRICTED,
    TORCH,
    import_table,
    listed,
    present,
    syntax_tree,
    violations,
)
from tests.conftest import SECONDS

ROOT = Path(paddock.__file__).parent
PACKAGES = import_table(paddock.__doc__ or "")
BUILT = [ROOT / package for package in PACKAGES if any((ROOT / package).rglob("*.py"))]
LIGHT = set(PACKAGES) - TORCH - {"serve", "bench"}  # these import the engine, which needs torch


def plant(root, file, source):
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(source)


def test_every_arrow_points_up_the_table():
    above = set()
    for package, used in PACKAGES.items():
        assert used <= above, package
        above.add(package)


def test_restrictions_name_packages_of_the_table():
    assert {place.split("/")[0] for places in RESTRICTED.values() for place in places} <= set(
        PACKAGES
    )


def test_no_package_violates_the_import_rule():
    assert list(violations(ROOT, PACKAGES)) == []


@pytest.mark.parametrize(
    ("file", "source", "line", "what"),
    [
        ("engine/a.py", "def f():\n    import paddock.train.loop", 2, "import 'train'"),
        ("engine/a.py", "from paddock import rl", 1, "import 'rl'"),
        ("model/mla/a.py", "from ..b import c", 1, "reach out of its folder by a relative import"),
        ("envs/a.py", "def f():\n    from torch import nn", 2, "use 'torch'"),
        ("train/a.py", "import torch\ntorch.cuda.synchronize()", 2, "use 'torch.cuda'"),
        ("kernels/a.py", "import triton.language as tl", 1, "use 'triton'"),
        ("rollout/a.py", "import subprocess", 1, "use 'subprocess'"),
        ("engine/a.py", "import os\n\nos.environ['A']", 3, "use 'os.environ'"),
        ("engine/a.py", "from os import getenv", 1, "use 'os.getenv'"),
        ("train/a.py", "def f():\n    print('step')", 2, "use 'print'"),
        ("cli/a.py", "import argparse", 1, "use 'argparse'"),
        ("rl/a.py", "from paddock.train.run import claim", 1, "import past 'paddock.train'"),
    ],
)
def test_a_violation_is_reported_with_file_and_line(tmp_path, file, source, line, what):
    plant(tmp_path, file, source)
    package = file.split("/")[0]
    assert list(violations(tmp_path, PACKAGES)) == [f"{file}:{line}: '{package}' may not {what}"]


@pytest.mark.parametrize("name", ["utils/a.py", "helpers.py"])
def test_a_folder_that_is_not_in_the_table_is_a_violation(tmp_path, name):
    plant(tmp_path, name, "")
    assert list(violations(tmp_path, PACKAGES)) == [
        f"{name.split('/')[0]}: no package of the table has this name"
    ]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("kernels/topk/triton.py", "import triton"),
        ("model/a.py", "from paddock.kernels.topk import index_topk"),
        ("cli/a.py", "import os, subprocess\ndef f():\n    import torch\n    print(os.environ)"),
        ("model/mla/a.py", "from .b import x\nfrom paddock.model.rope import y"),
    ],
)
def test_what_the_rule_allows_is_not_reported(tmp_path, file, source):
    plant(tmp_path, file, source)
    assert list(violations(tmp_path, PACKAGES)) == []


def test_every_package_docstring_lists_its_files():
    wrong = {package.name: listed(package) ^ present(package) for package in BUILT}
    assert {package: names for package, names in wrong.items() if names} == {}


def test_a_package_docstring_is_read_line_by_line(tmp_path):
    plant(tmp_path, "__init__.py", '"""A package.\n\na.py  one,\n      continued\nop/   two\n"""\n')
    plant(tmp_path, "op/reference.py", "")
    assert listed(tmp_path) == {"a.py", "op"}
    assert present(tmp_path) == {"op"}


def test_no_function_has_more_than_80_lines():
    """Device kernels are excepted: Triton and Gluon inline no helper without a cost."""
    files = [f for f in Path("paddock").rglob("*.py") if not re.match(r"(triton|gluon)", f.name)]
    lengths = {
        f"{file}:{node.name}": node.end_lineno - node.lineno + 1
        for file in files
        for node in ast.walk(syntax_tree(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: lines for name, lines in lengths.items() if lines > 80} == {}


def test_no_file_has_more_than_400_lines():
    files = [*ROOT.rglob("*.py"), *Path(__file__).parent.rglob("*.py")]
    lines = {str(file): len(file.read_text().splitlines()) for file in files}
    assert {file: count for file, count in lines.items() if count > 400} == {}


def test_the_longest_test_files_exist():
    folder = Path(__file__).parent
    assert [file for file in SECONDS if not (folder / file).exists()] == []


def error_of_importing(modules):
    """What a fresh interpreter says when one of `modules` fails to load or loads torch."""
    code = """if True:
        import importlib, sys
        for name in sys.argv[1:]:
            importlib.import_module(name)
            if "torch" in sys.modules:
                sys.exit(f"{name} loads torch")
    """
    command = [sys.executable, "-c", code, *modules]
    done = subprocess.run(command, cwd=ROOT.parent, stderr=subprocess.PIPE, text=True)
    return done.stderr if done.returncode else ""


def test_packages_without_torch_load_without_it():
    files = [
        file for package in BUILT if package.name in LIGHT for file in sorted(package.rglob("*.py"))
    ]
    paths = [file.relative_to(ROOT.parent).with_suffix("") for file in files]
    modules = [".".join(path.parts).removesuffix(".__init__") for path in paths]
    assert error_of_importing(modules) == ""


def test_loading_torch_is_noticed():
    assert error_of_importing(["json", "torch.version"]) == "torch.version loads torch\n"
