"""Every script in examples/ runs as its docstring says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
AGENTS = {*(ROOT / "examples").glob("*agent*.py")}  # of a run: tests/rl/test_agents.py


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted({*EXAMPLES} - AGENTS), ids=lambda path: path.stem)
def test_example_runs(script, tmp_path):
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short_and_says_how_to_run_it(script):
    text = script.read_text()
    assert len(text.splitlines()) < 65
    assert f"python examples/{script.name}" in text.split('"""')[1]
