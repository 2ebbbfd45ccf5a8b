import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paddock import __version__
from paddock.cli.__main__ import app
from paddock.cli.doctor import CORE, EXTRAS
from paddock.sandbox import bubblewrap, cgroups, seccomp

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


IMPORTED_AS = {"pyyaml": "yaml"}


def modules(requirements):
    names = [re.split(r"[<>=;\[]", name)[0].replace("-", "_") for name in requirements]
    return tuple(IMPORTED_AS.get(name, name) for name in names)


def test_doctor_looks_for_what_the_package_asks_for():
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    assert modules(project["dependencies"]) == CORE
    extras = {name: modules(asked) for name, asked in project["optional-dependencies"].items()}
    assert {name: extras[name] for name in extras if name != "dev"} == EXTRAS


def test_a_working_machine_is_well():
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0
    for word in (__version__, "torch", "CPU", "memory", "bubblewrap", "nvcc", "chromium", "docker"):
        assert word in done.stdout


@pytest.fixture
def _looked_at_anew():
    """What was found out about sandboxes is kept; here it differs from the rest of the process."""
    bubblewrap.unavailable_reason.cache_clear()
    yield
    bubblewrap.unavailable_reason.cache_clear()


@pytest.mark.skipif(bool(bubblewrap.unavailable_reason()), reason="no bubblewrap here")
def test_every_layer_of_a_sandbox_is_listed(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    told = CliRunner().invoke(app, ["doctor"]).stdout
    rows = [line.split() for line in told.splitlines() if "sandbox: " in line]
    assert {"namespaces", "system-call", "separate"} <= {row[2] for row in rows if row[0] == "ok"}


@pytest.mark.usefixtures("_looked_at_anew")
def test_a_missing_layer_says_what_is_lost(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(cgroups, "find_cgroup_parents", lambda: ())
    monkeypatch.setattr(seccomp, "unavailable_reason", lambda: "this kernel was built without it")
    told = CliRunner().invoke(app, ["doctor"]).stdout
    for lost in (
        "code inside can make every system call",
        "memory is limited per process",
        "a sandbox may keep every core busy",
        "only containers or no isolation are available",
    ):
        assert lost in told


@pytest.mark.usefixtures("_looked_at_anew")
def test_what_is_missing_comes_with_its_remedy(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setitem(EXTRAS, "data", ("no_such_module",))
    told = CliRunner().invoke(app, ["doctor"]).stdout
    assert "apt install bubblewrap" in told
    assert "apt install chromium" in told
    assert "pip install 'paddock[data]' for no_such_module" in told


def test_a_broken_library_is_named_and_fails(tmp_path):
    (tmp_path / "orjson.py").write_text("raise ImportError('half of it is gone')")
    done = subprocess.run(
        [sys.executable, "-m", "paddock.cli", "doctor"],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "COLUMNS": "200"},
        cwd=PYPROJECT.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if "orjson" in line]
    assert "BROKEN" in line
    assert "ImportError: half of it is gone" in line
