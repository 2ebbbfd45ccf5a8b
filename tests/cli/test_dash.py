import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from paddock.cli.__main__ import app
from paddock.launch.token_text import TokenizerText
from paddock.text.tokenizer import train_tokenizer
from tests.dashboard.runs import write_run


def invoke(*words):
    return CliRunner().invoke(app, ["dash", *map(str, words)])


@pytest.fixture
def dashboard():
    """Starts a dashboard; returns the process and its first lines."""
    running = []

    def start(*words):
        command = [sys.executable, "-m", "paddock.cli", "dash", "--port", "0", *map(str, words)]
        found = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        running.append(found)
        lines = [found.stdout.readline().strip() for _ in range(3)]
        return found, lines

    yield start
    for one in running:
        one.kill()
        one.communicate()


def test_dash_prints_its_address_answers_and_stops_on_sigint(dashboard, tmp_path):
    write_run(tmp_path / "nano" / "sft", [2.0, 1.0])
    running, lines = dashboard(tmp_path)
    assert lines[0] == f"1 run in {tmp_path}"
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", lines[1])
    (run,) = httpx.get(f"{lines[1]}/api/runs").json()["runs"]
    assert run["run"] == "nano/sft"
    running.send_signal(signal.SIGINT)
    assert running.wait(timeout=120) == 0
    assert running.stdout.read() == "stopped\n"


def test_the_demo_needs_no_run_and_is_removed_at_the_end(dashboard):
    running, lines = dashboard("--demo")
    assert lines[0].startswith("2 runs in ")
    folder = Path(lines[0].removeprefix("2 runs in "))
    runs = httpx.get(f"{lines[1]}/api/runs").json()["runs"]
    assert {run["status"] for run in runs} == {"finished"}
    assert folder.is_dir()
    running.send_signal(signal.SIGINT)
    assert running.wait(timeout=120) == 0
    assert not folder.exists()


def test_a_server_is_monitored(dashboard, tmp_path):
    """The dashboard itself has no engine metrics: the error is shown and it keeps running."""
    _, first = dashboard("--demo")
    _, lines = dashboard("--demo", "--engine-url", first[1])
    assert httpx.get(f"{lines[1]}/api/runs").json()["engine"] is True
    live = httpx.get(f"{lines[1]}/api/engine/live").json()
    assert live["rows"] == [] and "404" in live["error"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["nowhere"], "error: nowhere: folder not found"),
        (["--demo", "runs"], "--demo shows only the bundled run"),
        (["--demo", "--port", "99999"], "cannot listen on 127.0.0.1:99999"),
    ],
)
def test_an_invalid_folder_is_a_one_line_error(words, why):
    found = invoke(*words)
    assert found.exit_code == 1
    assert why in found.output


def test_token_texts_join_to_the_text():
    tokenizer = train_tokenizer(["the quick fox"], vocab=400)
    text = "the ☃ <think>fox</think>"
    ids = tokenizer.encode(text, specials=True)
    pieces = TokenizerText(tokenizer).pieces(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text
    assert [piece for piece, i in zip(pieces, ids, strict=True) if tokenizer.is_added(i)] == [
        "<think>",
        "</think>",
    ]
