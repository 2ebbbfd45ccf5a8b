"""Run index: which runs are found, their names, and incremental reading."""

import json
import os

import pytest

from paddock.dashboard.run_index import RunIndex, curve_data, summarize_run
from paddock.dashboard.run_view import LiveRunView, ReportError
from tests.dashboard.runs import write_run


def test_runs_below_a_folder_are_named_by_their_path(tmp_path):
    write_run(tmp_path / "nano" / "sft", [2.0])
    write_run(tmp_path / "nano" / "sft" / "checkpoints" / "not-this", [2.0])
    write_run(tmp_path / ".hidden", [2.0])
    write_run(tmp_path / "other", [2.0])
    assert RunIndex([tmp_path]).names() == ["nano/sft", "other"]
    assert RunIndex([tmp_path / "other"]).names() == ["other"]
    both = RunIndex([tmp_path / "nano", tmp_path / "other"])
    assert both.names() == ["nano/sft", "other"]
    assert both.folder("nano/sft") == tmp_path / "nano" / "sft"


def test_two_folders_with_the_same_name_get_different_names(tmp_path):
    first, second = write_run(tmp_path / "a" / "x", [1.0]), write_run(tmp_path / "b" / "x", [1.0])
    index = RunIndex([first, second])
    assert [index.folder(name) for name in index.names()] == [first, second]


def test_symlinks_are_not_followed(tmp_path):
    write_run(tmp_path / "outside" / "run", [2.0])
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "link").symlink_to(tmp_path / "outside")
    assert RunIndex([tmp_path / "inside"]).names() == []
    assert not RunIndex([tmp_path / "inside"]).contains(tmp_path / "inside" / "link" / "run")


@pytest.mark.parametrize("name", ["..", "../run", "/etc", "run/../run", "", "run\0"])
def test_a_name_is_never_a_path(tmp_path, name):
    write_run(tmp_path / "run", [2.0])
    with pytest.raises(ReportError, match="not found"):
        RunIndex([tmp_path]).run(name)


def test_new_runs_are_found_and_deleted_runs_removed(tmp_path):
    now = [0.0]
    index = RunIndex([tmp_path], clock=lambda: now[0])
    assert index.names() == []
    run = write_run(tmp_path / "run", [2.0])
    now[0] = 10.0
    assert index.names() == ["run"]
    for file in run.iterdir():
        file.unlink()
    with pytest.raises(ReportError, match="run not found"):
        index.run("run")


def test_only_what_was_added_is_read_again(tmp_path, monkeypatch):
    run = LiveRunView(write_run(tmp_path / "run", [2.0, 1.0], steps=4))
    assert run.refresh().steps_done == 2
    metrics = tmp_path / "run" / "metrics.jsonl"
    before = metrics.stat().st_size
    with metrics.open("a") as file:
        file.write('{"step": 3, "loss": 0.5}\n{"step": 4, "lo')
    offsets = []
    from paddock.dashboard import run_view

    true_follow = run_view.follow
    monkeypatch.setattr(
        run_view,
        "follow",
        lambda path, offset=0: offsets.append(offset) or true_follow(path, offset),
    )
    assert run.refresh().steps_done == 3  # the incomplete line is not read yet
    assert before in offsets
    offsets.clear()
    assert run.refresh().steps_done == 3
    assert offsets == []  # nothing new is read
    with metrics.open("a") as file:
        file.write('ss": 0.25}\n')
    assert run.refresh().curve("loss").y == [2.0, 1.0, 0.5, 0.25]


def test_a_replaced_file_is_read_again(tmp_path):
    run = LiveRunView(write_run(tmp_path / "run", [2.0, 1.0]))
    assert run.refresh().steps_done == 2
    other = tmp_path / "other.jsonl"
    line = json.dumps({"step": 9, "loss": 3.0, "note": "y" * 2000})  # longer than the old content
    other.write_text(line + "\n")
    os.replace(other, tmp_path / "run" / "metrics.jsonl")
    assert run.refresh().curve("loss").y == [3.0]


def test_a_resumed_run_drops_the_steps_after_its_checkpoint(tmp_path):
    run = LiveRunView(write_run(tmp_path / "run", [2.0, 1.0, 0.5], steps=4))
    run.refresh()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "loss": 7.0}\n')
    assert run.refresh().curve("loss").y == [2.0, 7.0]


def test_a_summary_of_a_run(tmp_path):
    run = LiveRunView(write_run(tmp_path / "run", [2.0, 1.0], held_out={2: 1.5})).refresh()
    found = summarize_run("run", run, now=2000.0)
    assert (found.status, found.step, found.of, found.metric) == ("finished", 2, 2, "val_loss")
    assert (found.value, found.seconds, found.ledger, found.pipeline) == (1.5, 1.0, False, False)


def test_a_long_curve_is_downsampled_and_keeps_its_spike(tmp_path):
    lines = [{"time": 5.0 + i, "step": i + 1, "loss": 1.0} for i in range(20_000)]
    lines[12_345]["loss"] = 99.0
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    run = LiveRunView(tmp_path).refresh()
    found = curve_data(run, "loss", smooth=5)
    assert len(found["y"]) < 2000
    assert max(found["y"]) == 99.0
    assert found["step"][found["y"].index(99.0)] == 12_346
    assert 1.0 < max(found["smooth"]) < 99.0
    assert found["seconds"][0] == 0.0
