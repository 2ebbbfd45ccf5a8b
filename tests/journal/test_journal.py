import json
from math import inf, nan
from pathlib import Path

import pytest

from paddock.journal import EVENTS_FILE, METRICS_FILE, Journal, follow


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def records(path: Path) -> list[dict]:
    return [record for record, _ in follow(path)]


@pytest.fixture
def synced(monkeypatch) -> list[int]:
    """The descriptors of fsync calls so far."""
    descriptors: list[int] = []
    monkeypatch.setattr("os.fsync", descriptors.append)
    return descriptors


def test_a_resumed_run_appends_to_the_same_files(tmp_path):
    for step in (1, 2):
        with Journal(tmp_path / "runs" / "a", clock=Clock()) as journal:
            journal.log_metrics(step, loss=0.5)
            journal.log_event("started", host="a\nb")
    assert records(tmp_path / "runs" / "a" / METRICS_FILE) == [
        {"time": 100.0, "step": 1, "loss": 0.5},
        {"time": 100.0, "step": 2, "loss": 0.5},
    ]
    assert (
        records(tmp_path / "runs" / "a" / EVENTS_FILE)
        == [{"time": 100.0, "kind": "started", "host": "a\nb"}] * 2
    )


def test_non_finite_numbers_are_strings_that_float_parses(tmp_path):
    with Journal(tmp_path) as journal:
        journal.log_metrics(1, a=nan, b=inf, c=-inf)
        journal.log_event("odd", values=[nan, {"deep": (inf,)}])

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    metric = json.loads((tmp_path / METRICS_FILE).read_text(), parse_constant=refuse)
    assert [str(float(metric[name])) for name in "abc"] == ["nan", "inf", "-inf"]
    event = json.loads((tmp_path / EVENTS_FILE).read_text(), parse_constant=refuse)
    assert event["values"] == ["NaN", {"deep": ["Infinity"]}]


def test_values_that_are_not_json_are_rejected_and_not_written(tmp_path):
    with Journal(tmp_path) as journal:
        with pytest.raises(TypeError):
            journal.log_event("odd", what={1, 2})
        with pytest.raises(ValueError, match=r"^time: "):
            journal.log_metrics(1, time=3.0)
        journal.log_metrics(1, loss=1.0)
    assert len(records(tmp_path / METRICS_FILE)) == 1
    assert records(tmp_path / EVENTS_FILE) == []


def test_an_event_is_on_disk_when_the_call_returns(tmp_path, synced):
    with Journal(tmp_path, clock=Clock()) as journal:
        journal.log_event("a")
        journal.log_event("b")
        assert len(synced) == 2


def test_metrics_are_synced_only_periodically(tmp_path, synced):
    clock = Clock()
    with Journal(tmp_path, clock=clock, sync_every_s=5.0) as journal:
        counts = []
        for clock.now in (100.0, 104.9, 105.0, 106.0, 109.9, 110.0):
            journal.log_metrics(1, loss=1.0)
            counts.append(len(synced))
        assert counts == [0, 0, 1, 1, 1, 2]


def test_a_truncated_line_is_removed_and_the_repair_is_logged(tmp_path):
    with Journal(tmp_path) as journal:
        journal.log_metrics(1, loss=1.0)
    whole = (tmp_path / METRICS_FILE).read_bytes()
    (tmp_path / METRICS_FILE).write_bytes(whole + b'{"step": 2, "lo')
    (tmp_path / EVENTS_FILE).write_bytes(b'{"kind')
    with Journal(tmp_path) as journal:
        assert (tmp_path / METRICS_FILE).read_bytes() == whole
        journal.log_metrics(2, loss=2.0)
    assert [record["step"] for record in records(tmp_path / METRICS_FILE)] == [1, 2]
    repairs = [(r["kind"], r["file"], r["torn_bytes"]) for r in records(tmp_path / EVENTS_FILE)]
    assert repairs == [("repaired", METRICS_FILE, 15), ("repaired", EVENTS_FILE, 6)]


def test_a_folder_has_one_writer_at_a_time(tmp_path):
    with (
        Journal(tmp_path),
        pytest.raises(BlockingIOError, match=r"is in use by another process \(pid \d+\)"),
    ):
        Journal(tmp_path)
    Journal(tmp_path).close()


def test_a_row_that_comes_after_the_end_is_dropped(tmp_path):
    journal = Journal(tmp_path)
    journal.log_row("rollouts", id=1)
    journal.close()
    journal.log_row("rollouts", id=2)
    assert len((tmp_path / "rollouts.jsonl").read_text().splitlines()) == 1
