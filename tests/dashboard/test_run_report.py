import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddock.dashboard import write_report
from paddock.dashboard.metrics import throughput_series
from paddock.dashboard.run_report import time_breakdown
from paddock.dashboard.run_view import ReportError, read_run
from paddock.journal import Journal
from tests.dashboard.runs import body, of_class, words, write_run

NAN = float("nan")
DAYS_LATER = 1e6


def page_of(run, now=DAYS_LATER):
    return body(write_report(run, clock=lambda: now))


def chart(main, title):
    """The readout data of the named chart."""
    (found,) = [
        figure
        for figure in main.iter("figure")
        if figure.get("data-chart") and words(figure.find("figcaption")).split(",")[0] == title
    ]
    return json.loads(found.get("data-chart"))


def tile(main, name):
    return {words(t.find("dt")): words(t.find("dd")) for t in of_class(main, "tiles")[0]}[name]


def test_a_finished_run_shows_its_curve_against_the_unigram_entropy(tmp_path):
    run = write_run(tmp_path / "nano" / "pretrain", [6.0, 4.0, 2.0, 1.0], held_out={4: 1.25})
    with Journal(run) as journal:
        journal.log_event("corpus", unigram_entropy=5.0)
    main = page_of(run)
    assert "nano / pretrain finished" in words(main.find("h1"))
    assert "Step 4 of 4." in words(main)
    loss, held_out = chart(main, "Loss nats/token")["series"]
    assert (loss["x"], loss["y"]) == ([100, 200, 300, 400], [6, 4, 2, 1])
    assert (held_out["x"], held_out["y"]) == ([400], [1.25])
    assert [r.text for r in of_class(main, "rule") if r.tag == "span"] == ["unigram entropy 5"]
    assert tile(main, "validation loss") == "1.25 25% of unigram entropy, 5"


def test_the_page_is_self_contained(tmp_path):
    text = write_report(write_run(tmp_path / "run", [2.0, 1.0])).read_text()
    assert not re.findall(r"https?:|//cdn|@import|url\(|<link|src=", text)

    class Balanced(HTMLParser):
        def __init__(self):
            super().__init__()
            self.open = []

        def handle_starttag(self, tag, attrs):
            self.open.append(tag)

        def handle_startendtag(self, tag, attrs):
            assert tag in ("meta", "input")  # other elements are not self-closing in HTML

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

    parser = Balanced()
    parser.feed(text)
    assert parser.open == []


@pytest.mark.parametrize(
    ("written", "now", "status"),
    [(3, 1010.0, "running"), (3, DAYS_LATER, "stopped"), (9, DAYS_LATER, "finished")],
)
def test_the_status_follows_from_the_journal_and_the_clock(tmp_path, written, now, status):
    run = write_run(tmp_path / "run", [1.0] * written, steps=9)
    assert of_class(page_of(run, now), "status")[0].text == status


def test_a_slow_run_counts_as_running_for_longer(tmp_path):
    run = write_run(tmp_path / "run", [], steps=9)
    with Journal(run, clock=lambda: 2000.0) as journal:
        journal.log_metrics(1, loss=1.0, step_time_s=300.0)
    assert read_run(run).status(2000.0 + 3000) == "running"
    assert read_run(run).status(2000.0 + 7000) == "stopped"


def test_a_pipeline_runs_while_a_stage_runs_and_finishes_at_its_end(tmp_path):
    pipeline = tmp_path / "plan"
    with Journal(pipeline, clock=lambda: 2000.0) as journal:
        journal.log_event("pipeline_started", stages=["first"], seed=0)
        assert read_run(pipeline).status(2000.0 + 7000) == "stopped"
        (pipeline / "first").mkdir()
        (pipeline / "first" / "metrics.jsonl").touch()
        os.utime(pipeline / "first" / "metrics.jsonl", (8900.0, 8900.0))
        assert read_run(pipeline).status(2000.0 + 7000) == "running"
        journal.log_event("pipeline_finished")
        assert read_run(pipeline).status(DAYS_LATER) == "finished"
        journal.log_event("pipeline_started", stages=["first"], seed=0)  # run again, and killed
        assert read_run(pipeline).status(DAYS_LATER) == "stopped"


def test_a_truncated_last_line_is_skipped(tmp_path):
    run = write_run(tmp_path / "run", [3.0, 2.0], steps=5)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"time": 1, "step": 3, "lo')
    assert chart(page_of(run), "Loss nats/token")["series"][0]["y"] == [3, 2]


def test_a_damaged_line_is_reported_and_earlier_lines_are_shown(tmp_path):
    run = write_run(tmp_path / "run", [3.0, 2.0], steps=5)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('garbage\n{"step": 4, "loss": 1.0}\n')
    main = page_of(run)
    assert "metrics.jsonl: line 3 is damaged" in words(main)
    assert chart(main, "Loss nats/token")["series"][0]["y"] == [3, 2]


def test_non_finite_numbers_are_gaps_and_are_reported(tmp_path):
    main = page_of(write_run(tmp_path / "run", [3.0, NAN, float("inf"), 2.0]))
    assert chart(main, "Loss nats/token")["series"][0]["y"] == [3, None, None, 2]
    assert "Not shown: loss NaN at 2 and 1 more." in words(main)


def test_steps_dropped_by_a_resume_are_not_shown(tmp_path):
    run = write_run(tmp_path / "run", [5.0, 4.0, 9.0, 9.0, 9.0], steps=5)
    with Journal(run, clock=lambda: 2000.0) as journal:  # back to the checkpoint of step 2
        journal.log_event("started", step=2, of=6)
        journal.log_metrics(3, loss=3.0, tokens=100, step_time_s=0.5)
    read = read_run(run)
    assert [line["loss"] for line in read.lines] == [5, 4, 3]
    assert read.tokens == [100, 200, 300]
    assert (read.steps_done, read.steps_planned) == (3, 6)
    assert time_breakdown(read)["stopped or recomputed"] == 2000 - 1003 - 0.5


def test_the_seconds_of_a_run_add_up(tmp_path):
    run = write_run(tmp_path / "run", [1.0] * 3, steps=9)
    with Journal(run, clock=lambda: 1007.0) as journal:
        journal.log_metrics(4, loss=1.0, tokens=100, step_time_s=2.0, val_loss=1.0)
    found = time_breakdown(read_run(run))
    assert found == {"steps": 2.0, "evaluation": 1.5, "checkpointing and other": 2.5}
    assert sum(found.values()) == 1007 - 1001


def test_throughput_excludes_steps_that_evaluate(tmp_path):
    run = write_run(tmp_path / "run", [1.0] * 4, held_out={2: 1.0})
    found = throughput_series(read_run(run))
    assert (found.x, found.y) == ([100, 300, 400], [200, 200, 200])


@pytest.mark.parametrize(
    "text", ["init = 3\nstart = 5\nmachine = 4\nsteps = 'x'", "stage = ", "[[["]
)
def test_an_odd_recipe_does_not_hide_the_run(tmp_path, text):
    run = write_run(tmp_path / "run", [3.0, 2.0])
    (run / "recipe.toml").write_text(text)
    main = page_of(run)
    assert chart(main, "Loss nats/token")["series"][0]["y"] == [3, 2]
    assert "Step 2 of 2." in words(main)


@pytest.mark.parametrize("missing", ["events.jsonl", "recipe.toml", "metrics.jsonl"])
def test_a_missing_file_is_reported_and_the_rest_is_shown(tmp_path, missing):
    run = write_run(tmp_path / "run", [3.0, 2.0])
    (run / missing).unlink()
    main = page_of(run)
    assert f"{missing} is missing" in words(main)
    assert ("no step was finished" in words(main)) == (missing == "metrics.jsonl")


def test_a_run_killed_before_its_first_step_has_a_page(tmp_path):
    main = page_of(write_run(tmp_path / "run", [], steps=9))
    assert "Step 0 of 9." in words(main)
    assert "no step was finished" in words(main)


def test_a_warmup_stage_shows_what_is_trained(tmp_path):
    run = write_run(tmp_path / "run", [], steps=9)
    with Journal(run) as journal:
        for step in (1, 2):
            journal.log_metrics(step, indexer_loss=7.0 / step, tokens=10, step_time_s=1.0)
    assert chart(page_of(run), "Indexer loss nats/query")["series"][0]["y"] == [7, 3.5]


def test_rewards_of_several_tasks_share_a_chart(tmp_path):
    run = tmp_path / "run"
    with Journal(run) as journal:
        for step in range(1, 41):
            sums, tools = step / 80, (0.25 if step < 21 else 0.75)
            reward = (sums + tools) / 2
            tasks = {"reward/sums": sums, "reward/tools": tools}
            journal.log_metrics(step, reward=reward, **tasks, zero_variance=0.5)
    main = page_of(run)
    shown = chart(main, "Reward by task mean of its rollouts")["series"]
    assert [series["name"] for series in shown] == ["sums", "tools"]
    assert tile(main, "reward, tools").startswith("0.25 \N{RIGHTWARDS ARROW} 0.75")
    assert tile(main, "reward, sums").startswith("0.02 \N{RIGHTWARDS ARROW} 0.49")
    chart(main, "Zero-variance groups share of groups with equal rewards")


def test_rl_is_drawn_over_updates_and_not_over_tokens(tmp_path):
    run = tmp_path / "run"
    with Journal(run) as journal:
        for step in (1, 2, 3):
            journal.log_metrics(
                step, policy_loss=0.1, reward=0.1 * step, tokens=10**step, step_time_s=2.0
            )
    drawn = chart(page_of(run), "Reward mean of all rollouts")
    assert drawn["series"][0]["x"] == [1, 2, 3]
    fast = chart(page_of(run), "Throughput tok/s")["series"][0]
    assert (fast["x"], fast["y"]) == ([1, 2, 3], [5, 50, 500])


def test_the_reward_of_the_only_task_is_shown_once(tmp_path):
    run = tmp_path / "run"
    with Journal(run) as journal:
        for step in (1, 2):
            journal.log_metrics(step, reward=0.5, **{"reward/tools": 0.5})
    chart(page_of(run), "Reward mean of all rollouts")
    captions = [words(caption) for caption in page_of(run).iter("figcaption")]
    assert sum("eward" in caption for caption in captions) == 1


def test_an_unknown_metric_gets_a_chart(tmp_path):
    run = write_run(tmp_path / "run", [])
    with Journal(run) as journal:
        journal.log_metrics(1, good_mood=0.5)
        journal.log_metrics(2, good_mood=0.7)
    found = chart(page_of(run), "good mood")
    assert found["label"] == "steps"  # no token counts
    assert found["series"][0]["x"] == [1, 2]


def test_held_out_loss_is_listed_per_source_first_and_last(tmp_path):
    run = write_run(tmp_path / "run", [1.0], held_out={1: 0.75})
    with Journal(run) as journal:
        journal.log_event("validation", step=[0], loss=7)  # not a table
        for step in (1, 2, 3):
            journal.log_event(
                "validation", step=step, loss={"code": 3.0 / step, "sums": NAN, "<b>": 2}
            )
    (found,) = [t for t in map(words, page_of(run).iter("table")) if "by source" in t]
    assert found == (
        "validation loss by source, nats/token step 1 step 3 "
        "code 3.000 1.000 sums nan nan <b> 2.000 2.000"
    )


def test_evaluations_are_tables(tmp_path):
    run = write_run(tmp_path / "run", [1.0], held_out={1: 0.75})
    with Journal(run) as journal:
        scores = {"needles": 0.35, "recall by layer": {"0": 0.9, "3": NAN}, "drafts": [0.8, 0.7]}
        journal.log_event("evaluated", step=1, label="sparse", scores=scores)
    main = page_of(run)
    tables = [words(table) for table in main.iter("table")]
    assert any("1 100 0.7500" in table for table in tables)
    assert any("needles sparse 0.35" in table for table in tables)
    assert "0 3 sparse 0.9 NaN" in tables
    assert "1 2 sparse 0.8 0.7" in tables


def test_utilization_and_memory_come_from_the_metrics(tmp_path):
    facts = {"flops_per_token": 6e9, "peak_flops": 4e12, "hardware": {"chip": "H200"}}
    run = write_run(tmp_path / "run", [2.0, 1.0], facts=facts, steps=3)
    with Journal(run) as journal:
        journal.log_metrics(3, loss=1.0, tokens=100, step_time_s=0.5, memory_bytes=3 * 2**30)
    main = page_of(run)
    assert tile(main, "MFU") == "30.0 % median"  # 200 tokens/s
    assert tile(main, "peak memory") == "3 GiB"
    assert chart(main, "Memory GiB")["series"][0]["y"] == [3]
    assert "chip H200" in words(main)


def test_names_from_a_run_are_escaped(tmp_path):
    evil = "<img src=x onerror=alert(1)>"
    run = write_run(tmp_path / evil.replace("/", ""), [1.0], facts={"hardware": {"chip": evil}})
    (run / "recipe.toml").write_text(f"stage = '{evil}'\n")
    with Journal(run) as journal:
        journal.log_metrics(2, **{evil: 1.0})
        journal.log_event(evil, what=evil)
        journal.log_event("evaluated", label=evil, scores={evil: 1.0, "x": {evil: 1.0}})
    main = page_of(run)
    assert not list(main.iter("img"))
    assert words(main).count(evil) >= 6


@pytest.mark.parametrize(
    ("made", "message"),
    [("nothing", "folder not found"), ("folder", ""), ("file", "folder not found")],
)
def test_a_folder_that_is_not_a_run_is_rejected(tmp_path, made, message):
    place = tmp_path / "place"
    if made == "folder":
        write_run(place / "pretrain", [1.0])
        message = "it holds neither metrics.jsonl nor events.jsonl; runs in it: pretrain"
    elif made == "file":
        place.write_text("")
    with pytest.raises(ReportError, match=message):
        write_report(place)
    assert not (place / "report.html").exists()


def test_an_out_of_range_timestamp_is_ignored(tmp_path):
    run = write_run(tmp_path / "run", [1.0])
    with (run / "events.jsonl").open("a") as file:
        file.write('{"time": 1e14, "kind": "odd"}\n')
    assert " odd" in words(page_of(run))


ODD = st.one_of(
    st.floats(),
    st.integers(),
    st.sampled_from(
        ["NaN", "Infinity", "-Infinity", "words", "", "\ud800", None, True, [], {}, [1], {"a": 2}]
    ),
)
LINES = st.lists(
    st.dictionaries(
        st.sampled_from(["step", "time", "tokens", "step_time_s", "loss", "held_out", "x<y"]), ODD
    ),
    max_size=6,
)
EVENTS = st.lists(
    st.dictionaries(
        st.sampled_from(
            ["time", "of", "unigram_entropy", "flops_per_token", "peak_flops", "machine"]
        ),
        ODD,
    ).flatmap(
        lambda fields: st.sampled_from(["started", "finished", "corpus", "evaluated"]).map(
            lambda kind: {"kind": kind, "scores": fields, **fields}
        )
    ),
    max_size=4,
)


@given(LINES, EVENTS)
@settings(max_examples=60)
def test_any_file_contents_give_a_page(lines, events):
    with TemporaryDirectory() as folder:
        run = Path(folder)
        for name, records in (("metrics.jsonl", lines), ("events.jsonl", events)):
            (run / name).write_text("".join(json.dumps(record) + "\n" for record in records))
        body(write_report(run))
