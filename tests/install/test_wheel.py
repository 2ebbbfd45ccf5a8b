"""The wheel alone, without the repository: recipes, pages and commands are all in it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the wheel's contents, first on the path of a new interpreter."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    (source / "paddock").symlink_to(ROOT / "paddock")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*command, "-w", folder, source], check=True, capture_output=True, timeout=300)
    (wheel,) = folder.glob("paddock-*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def paddock(site, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(site), "COLUMNS": "200"}
    command = [sys.executable, "-m", "paddock.cli", *arguments]
    return subprocess.run(
        command, cwd=site.parent, env=environment, capture_output=True, text=True, timeout=300
    )


def test_recipes_pages_and_types_ship_in_the_wheel(site):
    package = site / "paddock"
    assert (package / "recipes/nano/pipeline.toml").is_file()
    assert (package / "py.typed").is_file()
    ours = {p.relative_to(ROOT / "paddock") for p in (ROOT / "paddock").rglob("*.*") if p.is_file()}
    missing = {p for p in ours if "__pycache__" not in p.parts and not (package / p).exists()}
    assert missing == set()


def test_a_bundled_pipeline_runs_by_its_name_without_the_repository(site):
    found = paddock(site, "run", "nano", "--dry-run")
    assert found.returncode == 0, found.stderr
    assert "pretrain" in found.stdout
    assert "distill" in found.stdout


def test_doctor_runs_from_the_wheel(site):
    found = paddock(site, "doctor")
    assert found.returncode == 0, found.stderr
    assert "torch" in found.stdout
