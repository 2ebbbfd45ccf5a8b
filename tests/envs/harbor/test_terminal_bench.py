"""Tasks in the layout of terminal-bench 1."""

import asyncio
import sys

import pytest

from paddock.envs.harbor import TaskError, check_task, read_task
from tests.envs.harbor.tasks import SETTINGS, write
from tests.sandbox.sandboxes import BWRAP

TASK = """# canary
instruction: |-
  Write "hello" into hello.txt.
difficulty: easy
parser_name: pytest
max_agent_timeout_sec: 30
max_test_timeout_sec: 45.0
"""
RUN_TESTS = """#!/bin/bash
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
uv venv
source .venv/bin/activate
uv pip install pytest==8.4.1
apt-get update
uv run --with pytest pytest "$TEST_DIR/test_outputs.py" -rA
"""
TESTS = """from pathlib import Path

def test_there():
    assert Path("/app/hello.txt").read_text().strip() == "hello"
"""


@pytest.fixture
def folder(tmp_path):
    texts = {
        "task.yaml": TASK,
        "Dockerfile": "FROM ghcr.io/laude-institute/t-bench/python-3-13:1\nCOPY data.txt .\n",
        "docker-compose.yaml": "services:\n  client: {}\n  database: {}\n",
        "data.txt": "data\n",
        "run-tests.sh": RUN_TESTS,
        "tests/test_outputs.py": TESTS,
        "solution.yaml": "- command: echo hello > hello.txt\n  min_timeout_sec: 1\n",
    }
    return write(tmp_path / "hello", texts)


def test_a_task_is_converted_on_reading(folder):
    task = read_task(folder)
    (step,) = task.steps
    assert task.name == "terminal-bench/hello"
    assert step.instruction == 'Write "hello" into hello.txt.'
    assert task.agent_config(step).timeout_sec == 30
    assert task.verifier_config(step).timeout_sec == 45
    assert "service database of docker-compose.yaml is not started" in task.notes
    assert {path.name for path in task.environment.iterdir()} == {"Dockerfile", "data.txt"}
    assert (step.solution / "solve.sh").read_text().endswith("echo hello > hello.txt\n")


def test_a_changed_task_is_converted_again(folder):
    first = read_task(folder)
    assert read_task(folder).folder == first.folder
    (folder / "data.txt").write_text("other\n")
    assert read_task(folder).folder != first.folder


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("difficulty: easy\n", r"task.yaml: instruction: missing"),
        (
            "instruction: a\nmax_test_timeout_sec: soon\n",
            r"max_test_timeout_sec: must be a number of seconds, got 'soon'",
        ),
        ("a: [\n", r"task.yaml: not YAML"),
    ],
)
def test_a_malformed_task_is_named_with_file_and_field(folder, text, message):
    (folder / "task.yaml").write_text(text)
    with pytest.raises(TaskError, match=message):
        read_task(folder)


@pytest.mark.parametrize("backend", BWRAP)
def test_tests_that_install_pytest_find_it_installed(folder, backend):
    settings = SETTINGS.model_copy(update={"offline_python": sys.prefix})
    report = asyncio.run(check_task(read_task(folder), settings))
    assert report.is_sound, report.problems
    assert report.empty == {"reward": 0.0}
