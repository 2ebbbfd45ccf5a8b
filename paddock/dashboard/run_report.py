"""Report of one run: headline figures, charts, validation, time, recipe and hardware."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from paddock.dashboard.bar_charts import heat_map, stacked_bar
from paddock.dashboard.charts import ReferenceLine, smoothing_toggle
from paddock.dashboard.html import Html, details, join, page, section, table, tag, tiles
from paddock.dashboard.metrics import (
    LOSS_DISPLAY,
    chart,
    final_value,
    first_and_last,
    last_half,
    metric_chart,
    metric_display,
    mfu_series,
    reward_chart,
    reward_metrics,
    run_smoothing_window,
    throughput_series,
)
from paddock.dashboard.run_view import RunView, format_setting, parse_number_or_none, read_run
from paddock.dashboard.scale import format_bytes, format_duration, format_number

REPORT = "report.html"
NON_FINITE_FILES = ("non_finite_batch.npz", "not-finite.npz")  # the second of older runs
LANGUAGE = ("loss", "mtp_loss", "val_loss")  # in nats/token: drawn in one chart


def write_report(
    folder: str | Path, out: str | Path | None = None, *, clock: Callable[[], float] = time.time
) -> Path:
    """Write the report of a run to `out`, by default report.html in its folder; returns it.

    Works for running, finished, killed and partly damaged runs.
    """
    run = read_run(folder)
    file = Path(out) if out is not None else run.path / REPORT
    file.write_text(page(run.name, *run_report(run, clock())), "utf-8", "replace")
    return file


def run_report(run: RunView, now: float) -> Iterator[Html]:
    status = run.status(now)
    yield tag("h1", run.name, " ", tag("span", status, class_=f"status {status}"))
    yield tag("p", summary_text(run), class_="lead")
    yield join(tag("p", f"Note: {text}.", class_="note") for text in report_notes(run, status))
    if run.lines:
        yield tiles(headline_tiles(run))
        yield section(
            "Loss and reward", smoothing_toggle(run_smoothing_window(run)), *loss_charts(run)
        )
    yield evaluation_section(run)
    if run.lines:
        yield section("Other metrics", tag("div", join(other_charts(run)), class_="grid"))
        yield section("Time", time_section(run))
    yield section("Recipe and hardware", recipe_section(run))
    yield section("Events", events_section(run))


def summary_text(run: RunView) -> str:
    flat = flatten(run.recipe)
    origin = flat.get("init.preset") or flat.get("init.checkpoint") or "unknown"
    planned = run.steps_planned
    done = f"Step {run.steps_done:,}" + (f" of {planned:,}" if planned else "")
    parts = [f"Stage {flat.get('stage', 'unknown')}", f"from {origin}"]
    parts += [f"seed {flat['seed']}"] if "seed" in flat else []
    return f"{', '.join(parts)}. {done}."


def report_notes(run: RunView, status: str) -> Iterator[str]:
    yield from run.warnings
    if not run.lines:
        yield "no step was finished"
    for name in NON_FINITE_FILES:
        if status == "stopped" and (run.path / name).is_file():
            yield f"non-finite loss or gradient; the batch is saved in {name}"


def headline_tiles(run: RunView) -> Iterator[tuple[str, str, str]]:
    """The figures at the top of the report: (name, value, remark)."""
    val_loss, entropy = (
        run.curve("val_loss").y,
        run.latest_positive_value("corpus", "unigram_entropy"),
    )
    if val_loss:
        remark = "nats/token"
        if entropy:
            remark = f"{val_loss[-1] / entropy:.0%} of unigram entropy, {format_number(entropy)}"
        yield "validation loss", format_number(val_loss[-1]), remark
    for name in ("loss", "indexer_loss"):
        if name in run.metrics:
            value, meaning = final_value(run.curve(name))
            yield metric_display(name).title.lower(), format_number(value), meaning
    yield from before_and_after(run)
    if run.tokens:
        yield "tokens", format_number(run.tokens[-1]), f"{run.steps_done:,} steps"
    if (throughput := throughput_series(run)).y:
        yield "throughput", format_number(median(throughput.y)), "tok/s, median"
    if (mfu := mfu_series(run)) is not None and mfu.y:
        yield "MFU", f"{median(mfu.y):.1f} %", "median"
    if memory := [value for value in run.curve("memory_bytes").y if isfinite(value)]:
        yield "peak memory", format_bytes(max(memory)), ""
    yield "time", format_duration(sum(time_breakdown(run).values())), ""


def before_and_after(run: RunView) -> Iterator[tuple[str, str, str]]:
    """What an RL stage changes: rewards, and how often MTP drafts are accepted."""
    for name in reward_metrics(run):
        first, last = first_and_last(run.curve(name))
        yield (
            metric_display(name).title.lower(),
            f"{first:.2f} \N{RIGHTWARDS ARROW} {last:.2f}",
            "mean of first and last 5 %",
        )
    if accepted := run.curve("accept_length").y:
        before_after = f"{accepted[0]:.2f} \N{RIGHTWARDS ARROW} {accepted[-1]:.2f}"
        yield "MTP acceptance length", before_after, "before and after"


def loss_charts(run: RunView) -> Iterator[Html]:
    """Losses of the whole run and of its second half; in other stages indexer loss or rewards."""
    if "loss" not in run.metrics:
        if "indexer_loss" in run.metrics:
            yield metric_chart(run, "indexer_loss")
        if reward_metrics(run):
            yield reward_chart(run)
        return
    entropy = run.latest_positive_value("corpus", "unigram_entropy")
    rules = [ReferenceLine("unigram entropy", entropy)] if entropy else []
    curves = [run.curve(name) for name in LANGUAGE if name in run.metrics]
    yield chart(run, LOSS_DISPLAY, curves, *rules)
    if len(run.lines) >= 100:
        second_half = replace(LOSS_DISPLAY, title="Loss, second half")
        yield chart(run, second_half, [last_half(curve) for curve in curves])


def other_charts(run: RunView) -> Iterator[Html]:
    """A chart of every other metric, known or not."""
    shown = (
        set(LANGUAGE)
        if "loss" in run.metrics
        else {"indexer_loss", "val_loss", *reward_metrics(run)}
    )
    if len(reward_metrics(run)) == 1:
        shown.add("reward")  # the same
    for name in run.metrics:
        if name not in shown:
            yield metric_chart(run, name)
    if (throughput := throughput_series(run)).y:
        yield chart(run, metric_display("speed"), [throughput])
    if (mfu := mfu_series(run)) is not None and mfu.y:
        yield chart(run, metric_display("mfu"), [mfu])


def evaluation_section(run: RunView) -> Html:
    """Validation losses and scores; empty if there are none."""
    validation = run.curve("val_loss")
    parts = []
    if validation.y:
        rows = [
            (f"{step:,.0f}", format_number(x), f"{y:.4f}")
            for step, x, y in zip(validation.step, validation.x, validation.y, strict=True)
        ]
        head = ("step", run.progress[0], "validation loss, nats/token")
        parts.append(
            table(
                head,
                rows if len(rows) <= 12 else [*rows[:2], ("...",) * 3, *rows[-9:]],
                text_columns=0,
            )
        )
    parts += loss_by_source(run)
    parts += score_tables(run)
    return section("Evaluation", tag("div", *parts, class_="grid")) if parts else Html()


def loss_by_source(run: RunView) -> Iterator[Html]:
    """Validation loss of each source at its first and last measurement."""
    found = [
        (event.get("step", "?"), event["loss"])
        for event in run.events
        if event.get("kind") == "validation" and isinstance(event.get("loss"), Mapping)
    ]
    shown = [found[0], found[-1]] if len(found) > 1 else found

    def cell(value: object) -> str:
        return "" if (loss := parse_number_or_none(value)) is None else f"{loss:.3f}"

    if shown:
        rows = [(name, *(cell(losses.get(name)) for _, losses in shown)) for name in shown[-1][1]]
        head = "validation loss by source, nats/token"
        yield table((head, *(f"step {step}" for step, _ in shown)), rows)


def score_tables(run: RunView) -> Iterator[Html]:
    """Scores of `evaluated` events: numbers as a table, lists (by layer, by depth) as heat maps."""
    named = [
        (str(event.get("label") or f"step {event.get('step', '?')}"), event["scores"])
        for event in run.events
        if event.get("kind") == "evaluated" and isinstance(event.get("scores"), Mapping)
    ]
    kinds = {name: value for _, found in named for name, value in found.items()}
    single = [name for name, value in kinds.items() if parse_number_or_none(value) is not None]
    if single:
        rows = [
            (
                label,
                *(
                    "" if (v := parse_number_or_none(found.get(n))) is None else format_number(v)
                    for n in single
                ),
            )
            for label, found in named
        ]
        yield table(("", *single), rows)
    for name in (name for name, value in kinds.items() if isinstance(value, Mapping | list)):
        listed = {label: _listed(found[name]) for label, found in named if name in found}
        columns = list(dict.fromkeys(column for row in listed.values() for column in row))
        values = [[row.get(column) for column in columns] for row in listed.values()]
        yield heat_map(name, list(listed), columns, values)


def _listed(values: object) -> dict[str, float | None]:
    if isinstance(values, Mapping):
        return {str(key): parse_number_or_none(value) for key, value in values.items()}
    rest = values if isinstance(values, list) else [values]
    return {
        str(position): parse_number_or_none(value) for position, value in enumerate(rest, start=1)
    }


OTHER_TIME, LOST_TIME = "checkpointing and other", "stopped or recomputed"


def time_breakdown(run: RunView) -> dict[str, float]:
    """Seconds by activity, from the first start to the last event.

    Validation time is what a step with validation takes beyond the median step. Time between two
    steps is checkpointing and the like, or lost if the run was restarted in between.
    """
    plain = [
        line["step_time_s"]
        for line in run.lines
        if "step_time_s" in line and "val_loss" not in line
    ]
    usual = median(plain) if plain else 0.0
    starts = [e["time"] for e in run.events if e.get("kind") == "started" and "time" in e]
    ends = [e["time"] for e in run.events if e.get("kind") == "finished" and "time" in e]
    found = {"steps": 0.0, "evaluation": 0.0, OTHER_TIME: 0.0, LOST_TIME: 0.0}
    last = min(starts, default=None)
    for line in run.lines:
        seconds, now = line.get("step_time_s", 0.0), line.get("time")
        validation = max(0.0, seconds - usual) if "val_loss" in line else 0.0
        found["steps"] += seconds - validation
        found["evaluation"] += validation
        if last is not None and now is not None:
            restarted = any(last < start <= now for start in starts)
            between = LOST_TIME if restarted else OTHER_TIME
            found[between] += max(0.0, now - last - seconds)
        last = last if now is None else now
    if ends and last is not None:
        found[OTHER_TIME] += max(0.0, ends[-1] - last)
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def time_section(run: RunView) -> Html:
    times = [record["time"] for record in (*run.events, *run.lines) if "time" in record]
    period = ""
    if times:
        period = f"From {_timestamp(min(times))} to {_timestamp(max(times))} UTC."
    return join((stacked_bar(time_breakdown(run), format_duration), tag("p", period)))


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


SETTINGS = (
    "stage",
    "init.preset",
    "init.checkpoint",
    "steps",
    "seed",
    "dataloader.seq_len",
    "dataloader.batch_tokens",
    "optim.type",
    "optim.muon_split",
    "optim.lr",
    "optim.schedule",
    "optim.weight_decay",
    "loss.mtp_depths",
)


def recipe_section(run: RunView) -> Html:
    flat = flatten(run.recipe)
    chosen = [(name, format_setting(flat[name])) for name in SETTINGS if name in flat]
    tables = [
        table((head, ""), rows, text_columns=2)
        for head, rows in (("recipe", chosen), ("hardware", list(hardware_rows(run))))
        if rows
    ]
    whole = details("Resolved recipe", tag("pre", run.recipe_text))
    return join((tag("div", *tables, class_="grid"), whole if run.recipe_text else ""))


def flatten(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys.

    >>> flatten({"steps": 9, "optim": {"lr": 0.1}})
    {'steps': 9, 'optim.lr': 0.1}
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= (
            flatten(value, f"{above}{name}.")
            if isinstance(value, Mapping)
            else {above + name: value}
        )
    return found


def hardware_rows(run: RunView) -> Iterator[tuple[str, str]]:
    """Recorded hardware, then compute and parallel settings."""
    hardware = run.latest_event_value("started", "hardware")
    for name, value in flatten(hardware).items() if isinstance(hardware, Mapping) else ():
        yield name, format_setting(value)
    for name, value in flatten(run.recipe).items():
        if name.startswith(("compute.", "parallel.")):
            yield name, format_setting(value)


def events_section(run: RunView) -> Html:
    rows = [
        (
            _timestamp(event["time"]) if "time" in event else "",
            str(event.get("kind", "")),
            ", ".join(
                f"{k} {format_setting(v)}" for k, v in event.items() if k not in ("time", "kind")
            ),
        )
        for event in run.events
    ]
    return details(f"{len(rows)} events", table(("time, UTC", "kind", ""), rows, text_columns=3))
