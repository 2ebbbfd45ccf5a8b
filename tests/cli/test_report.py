"""`paddock report`."""

import pytest
from typer.testing import CliRunner

from paddock.cli.__main__ import app
from tests.dashboard.runs import write_run


def report(*words):
    return CliRunner().invoke(app, ["report", *map(str, words)])


def test_the_report_is_written_to_the_run_folder(tmp_path):
    run = write_run(tmp_path / "run", [2.0, 1.0])
    done = report(run)
    assert (done.exit_code, done.stdout) == (0, f"report: {run / 'report.html'}\n")
    assert "<h1>" in (run / "report.html").read_text()


def test_the_report_is_written_to_out(tmp_path):
    run = write_run(tmp_path / "run", [2.0, 1.0])
    assert report(run, "--out", tmp_path / "x.html").exit_code == 0
    assert (tmp_path / "x.html").is_file()
    assert not (run / "report.html").exists()


def test_arms_are_names_with_folders_or_patterns(tmp_path):
    for name in ("split-0", "split-1", "adamw-0", "adamw-1"):
        write_run(tmp_path / name, [2.0, 1.0], seed=int(name[-1]))
    arms = [f"split={tmp_path}/split-*", f"AdamW={tmp_path / 'adamw-0'},{tmp_path / 'adamw-1'}"]
    done = report("--compare", *arms, "--out", tmp_path / "c.html")
    assert done.exit_code == 0, done.output
    text = (tmp_path / "c.html").read_text()
    assert "<h1>Loss: split, AdamW</h1>" in text
    assert "4 runs in 2 arms" in text


def test_a_folder_without_a_name_is_its_own_arm(tmp_path):
    runs = [write_run(tmp_path / name, [2.0, 1.0]) for name in ("lr=1,2", "plain")]
    done = report("--compare", *runs, "--out", tmp_path / "c.html")
    assert done.exit_code == 0, done.output
    assert "<h1>Loss: lr=1,2, plain</h1>" in (tmp_path / "c.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere: folder not found"),
        (["a", "b", "--out", "x.html"], "--out names one page, but 2 runs were given"),
        (["a", "--metric", "loss"], "--metric needs --compare"),
        (["--compare", "a=", "b=x"], "'a=' is not an arm such as NAME=RUN,RUN"),
        (["--compare", "a=x", "a=y"], "two arms are called 'a'; give them names: NAME=RUN,RUN"),
        (["--compare", "a=none-*"], "'none-*' matches no folder"),
    ],
)
def test_invalid_arguments_are_a_one_line_error(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    done = report(*words)
    assert (done.exit_code, done.stderr) == (1, f"error: {message}\n")
