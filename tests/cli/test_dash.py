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


def told(*words):
    return CliRunner().invoke(app, ["dash", *map(str, words)])


@pytest.fixture
def dashboard():
    """Starts one; what it says first, as soon as it listens."""
    running = []

    def start(*words):
        command = [sys.executable, "-m", "paddock.cli", "dash", "--port", "0", *map(str, words)]
        found = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        running.append(found)
        said = [found.stdout.readline().strip() for _ in range(3)]
        return found, said

    yield start
    for one in running:
        one.kill()
        one.communicate()


def test_it_says_where_it_listens_answers_there_and_ends_on_demand(dashboard, tmp_path):
    write_run(tmp_path / "nano" / "sft", [2.0, 1.0])
    running, said = dashboard(tmp_path)
    assert said[0] == f"1 run in {tmp_path}"
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", said[1])
    (run,) = httpx.get(f"{said[1]}/api/runs").json()["runs"]
    assert run["run"] == "nano/sft"
    running.send_signal(signal.SIGINT)
    assert running.wait(timeout=120) == 0
    assert running.stdout.read() == "stopped\n"


def test_the_demo_needs_no_run_and_goes_when_it_ends(dashboard):
    running, said = dashboard("--demo")
    assert said[0].startswith("2 runs in ")
    folder = Path(said[0].removeprefix("2 runs in "))
    runs = httpx.get(f"{said[1]}/api/runs").json()["runs"]
    assert {run["status"] for run in runs} == {"finished"}
    assert folder.is_dir()
    running.send_signal(signal.SIGINT)
    assert running.wait(timeout=120) == 0
    assert not folder.exists()


def test_a_server_is_watched(dashboard, tmp_path):
    """The dashboard's own server has no metrics: what is wrong is said, and it goes on."""
    _, first = dashboard("--demo")
    _, said = dashboard("--demo", "--engine-url", first[1])
    assert httpx.get(f"{said[1]}/api/runs").json()["engine"] is True
    live = httpx.get(f"{said[1]}/api/engine/live").json()
    assert live["rows"] == [] and "404" in live["error"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["nowhere"], "error: nowhere: folder not found"),
        (["--demo", "runs"], "--demo shows only the bundled run"),
        (["--demo", "--port", "99999"], "cannot listen on 127.0.0.1:99999"),
    ],
)
def test_what_cannot_be_shown_is_said_in_a_line(words, why):
    found = told(*words)
    assert found.exit_code == 1
    assert why in found.output


def test_pieces_of_a_token_are_the_text_again():
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
