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


def test_doctor_checks_the_dependencies_of_the_package():
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    assert modules(project["dependencies"]) == CORE
    extras = {name: modules(needed) for name, needed in project["optional-dependencies"].items()}
    assert {name: extras[name] for name in extras if name != "dev"} == EXTRAS


def test_a_working_machine_passes():
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0
    for word in (__version__, "torch", "CPU", "memory", "bubblewrap", "nvcc", "chromium", "docker"):
        assert word in done.stdout


@pytest.fixture
def _clear_backend_cache():
    """Clear cached sandbox checks, because these tests change their result."""
    bubblewrap.unavailable_reason.cache_clear()
    yield
    bubblewrap.unavailable_reason.cache_clear()


@pytest.mark.skipif(bool(bubblewrap.unavailable_reason()), reason="no bubblewrap here")
def test_every_layer_of_a_sandbox_is_listed(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    output = CliRunner().invoke(app, ["doctor"]).stdout
    rows = [line.split() for line in output.splitlines() if "sandbox: " in line]
    assert {"namespaces", "system-call", "separate"} <= {row[2] for row in rows if row[0] == "ok"}


@pytest.mark.usefixtures("_clear_backend_cache")
def test_a_missing_isolation_layer_is_reported_with_its_effect(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(cgroups, "find_cgroup_parents", lambda: ())
    monkeypatch.setattr(seccomp, "unavailable_reason", lambda: "this kernel was built without it")
    output = CliRunner().invoke(app, ["doctor"]).stdout
    for lost in (
        "code inside can make every system call",
        "memory is limited per process",
        "a sandbox may keep every core busy",
        "only containers or no isolation are available",
    ):
        assert lost in output


@pytest.mark.usefixtures("_clear_backend_cache")
def test_missing_dependencies_are_reported_with_install_commands(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setitem(EXTRAS, "data", ("no_such_module",))
    output = CliRunner().invoke(app, ["doctor"]).stdout
    assert "apt install bubblewrap" in output
    assert "apt install chromium" in output
    assert "pip install 'paddock[data]' for no_such_module" in output


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
