import json

import pytest
from typer.testing import CliRunner

from paddock.cli.__main__ import app
from paddock.data.reasoning import ReasoningSource
from paddock.journal import Journal
from paddock.train import train
from tests.train.tiny import network_folder, run_in, settings


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("look")
    corpus = {
        "sources": (ReasoningSource(name="chains", family="chains", count=60),),
        "held_out_fraction": 0.2,
    }
    chosen = settings(network_folder(folder / "init"), steps=2, corpus=corpus)
    made = run_in(folder / "run", chosen)
    train(made, log=lambda _: None, on_update=lambda _: None)
    return made.folder


def look(*words):
    return CliRunner().invoke(app, ["look", *map(str, words)])


def lines(run):
    return [json.loads(line) for line in (run / "network.jsonl").read_text().splitlines()]


def test_the_newest_checkpoint_is_inspected_on_held_out_text(run):
    found = look(run)
    assert found.exit_code == 0, found.output
    assert str(run / "network.jsonl") in found.output
    row = lines(run)[-1]
    assert row["step"] == 2
    assert len(row["pieces"]) > 4
    assert row["experts"] and all(sum(layer["load"]) > 0 for layer in row["experts"])


def test_a_custom_text(run, tmp_path):
    (tmp_path / "text.txt").write_text("1 + 2 = 3, and 4 more " * 30)
    assert look(run, "--text", tmp_path / "text.txt").exit_code == 0
    assert "".join(lines(run)[-1]["pieces"]).startswith("1 + 2 = 3")


def test_unreadable_text_and_missing_runs_are_reported(run, tmp_path):
    (tmp_path / "empty.txt").touch()
    found = look(run, "--text", tmp_path / "empty.txt")
    assert found.exit_code == 1 and "fewer than two tokens" in found.output
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    found = look(run, "--text", tmp_path / "picture.png")
    assert found.exit_code == 1 and "picture.png: not UTF-8 text" in found.output
    found = look(tmp_path)
    assert found.exit_code == 1 and "error: " in found.output
    with Journal(run):
        found = look(run)
    assert found.exit_code == 1 and "is in use by another process" in found.output
