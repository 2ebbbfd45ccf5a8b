"""Rows of JSONL files, read in pages from the end; metrics of an engine parsed to numbers."""

import json

import httpx
import pytest

from paddock.dashboard import jsonl_pages
from paddock.dashboard.engine_monitor import EngineMonitor, parse_metrics
from paddock.dashboard.run_view import read_run
from paddock.engine import EngineStats
from paddock.engine.stats import CumulativeStats
from paddock.serve.metrics import MetricsCollector


def written(path, count):
    path.write_text("".join(json.dumps({"time": i, "x": "y" * 90}) + "\n" for i in range(count)))
    return path


def test_pages_have_no_gap_and_no_duplicate_row(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl_pages, "PAGE_BYTES", 1000)
    path = written(tmp_path / "rows.jsonl", 50)
    found, before, sizes = [], None, []
    while before != 0:
        page, before = jsonl_pages.read_page(path, before)
        sizes.append(len(page))
        found = page + found
    assert [row["time"] for row in found] == list(range(50))
    assert max(sizes) <= 10


@pytest.mark.parametrize("torn", ["", '{"time": 3'])
def test_a_row_that_is_longer_than_a_page_is_shown(tmp_path, monkeypatch, torn):
    monkeypatch.setattr(jsonl_pages, "PAGE_BYTES", 1000)
    path = tmp_path / "network.jsonl"
    wide = [{"time": i, "selected": "A" * 5000} for i in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in wide) + torn)
    found, before = [], None
    while before != 0:
        page, before = jsonl_pages.read_page(path, before)
        assert page
        found = page + found
    assert found == wide


def test_a_truncated_or_damaged_line_is_skipped(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"time": 1}\n{"time": \n[3]\n\xff\n{"time": 4}\n{"time": 5', "latin-1")
    assert [row["time"] for row in jsonl_pages.read_page(path)[0]] == [1, 4]
    assert jsonl_pages.read_page(tmp_path / "none.jsonl") == ([], 0)


def test_an_invalid_span_is_skipped(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    wrong = [{"time": 5}, {"time": 1, "started": 2}, {"time": "x", "started": 1}, {"time": 9e99}]
    right = {"time": 5.0, "started": 1.0, "task": "a"}
    path.write_text("".join(json.dumps(row) + "\n" for row in (*wrong, right)))
    assert [bar["started"] for bar in jsonl_pages.timeline(path, None, [])["bars"]] == [1.0]


def stats(**changes):
    names = set(EngineStats.__dataclass_fields__) - {"counters"}
    counted = CumulativeStats(prompt_tokens=90, generated_tokens=40, verify_steps=20)
    return EngineStats(counters=counted, **(dict.fromkeys(names, 1) | changes))


def test_metrics_of_our_own_server_are_parsed():
    shown = MetricsCollector(prefix="sglang:", model="m", clock=lambda: 1.0)
    replicas = [stats(running=3, waiting=2, pages_total=10, pages_used=6), stats(running=1)]
    found = parse_metrics(shown.render(replicas, sessions=2).decode())
    assert (found["num_running_reqs"], found["num_queue_reqs"]) == (4, 3)
    assert found["token_usage"] == pytest.approx(0.25)  # half of one replica, nothing of the other
    assert (found["prompt_tokens"], found["generation_tokens"]) == (180, 80)
    assert found["spec_accept_length"] == 2.0
    assert found["weight_version"] == 1


def test_a_server_is_polled_once_a_second_and_errors_are_reported(monkeypatch):
    sent, answer = [], httpx.Response(200, text="# TYPE a:x gauge\na:x 3\n")

    def get(url, **options):
        sent.append((url, options["headers"]))
        if answer is None:
            raise httpx.ConnectError("refused")
        answer.request = httpx.Request("GET", url)
        return answer

    monkeypatch.setattr(httpx, "get", get)
    watch = EngineMonitor("http://engine:9/", key="k")
    now = [0.0]
    for now[0] in (0.0, 0.5, 1.0):
        found = watch.poll(lambda: now[0])
    assert [row["x"] for row in found["rows"]] == [3.0, 3.0]
    assert sent == [("http://engine:9/metrics", {"Authorization": "Bearer k"})] * 2
    answer = None
    found = watch.poll(lambda: 9.0)
    assert len(found["rows"]) == 2 and "refused" in found["error"]


def test_files_of_older_runs_are_shown_under_current_names(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    old = {"time": 5.0, "began": 1.0, "task": "a", "member": 3, "failed": "world at start"}
    path.write_text(json.dumps(old) + "\n")
    (bar,) = jsonl_pages.timeline(path, None, [])["bars"]
    assert (bar["started"], bar["rollout"], bar["failure"]) == (1.0, 3, "environment at start")
    lines = [{"step": 1, "loss": 2.0, "held_out": 1.5, "seconds": 0.5, "reward_tools": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = [{"kind": "started", "machine": {"chip": "H200"}}, {"kind": "plan", "seed": 0}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (tmp_path / "recipe.toml").write_text('[start]\nfolder = "runs/sft"\n')
    run = read_run(tmp_path)
    assert run.metrics == ["loss", "val_loss", "reward/tools"]
    assert run.latest_event_value("started", "hardware") == {"chip": "H200"}
    assert run.events[1]["kind"] == "pipeline_started"
    assert run.recipe == {"init": {"checkpoint": "runs/sft"}}
