"""One run on one page: how it went, what it was, what it cost."""

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
LANGUAGE = ("loss", "mtp", "held_out")  # nats a token: they share a picture


def write_report(
    folder: str | Path, out: str | Path | None = None, *, clock: Callable[[], float] = time.time
) -> Path:
    """Write the page of a run, into its folder unless told otherwise; returns where it is.

    Works while the run is under way, after it was killed, and with what is left of it.
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
        yield section("Learning", smoothing_toggle(run_smoothing_window(run)), *loss_charts(run))
    yield evaluation_section(run)
    if run.lines:
        yield section("Further curves", tag("div", join(other_charts(run)), class_="grid"))
        yield section("Time", time_section(run))
    yield section("Recipe and machine", recipe_section(run))
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
    if status == "stopped" and (run.path / "not-finite.npz").is_file():
        yield "a loss or gradient was not finite; the batch lies in not-finite.npz"


def headline_tiles(run: RunView) -> Iterator[tuple[str, str, str]]:
    held_out, entropy = (
        run.curve("held_out").y,
        run.latest_positive_value("corpus", "unigram_entropy"),
    )
    if held_out:
        beside = "nats a token"
        if entropy:
            beside = (
                f"{held_out[-1] / entropy:.0%} of the unigram entropy, {format_number(entropy)}"
            )
        yield "held-out loss", format_number(held_out[-1]), beside
    for name in ("loss", "indexer"):
        if name in run.metrics:
            value, said = final_value(run.curve(name))
            yield metric_display(name).title.lower(), format_number(value), said
    for name in reward_metrics(run):
        first, last = first_and_last(run.curve(name))
        yield (
            metric_display(name).title.lower(),
            f"{first:.2f} \N{RIGHTWARDS ARROW} {last:.2f}",
            "first and last twentieth",
        )
    if run.tokens:
        yield "tokens", format_number(run.tokens[-1]), f"{run.steps_done:,} steps"
    if (fast := throughput_series(run)).y:
        yield "speed", format_number(median(fast.y)), "tokens a second, median"
    if (used := mfu_series(run)) is not None and used.y:
        yield "MFU", f"{median(used.y):.1f} %", "median"
    if memory := [value for value in run.curve("memory_bytes").y if isfinite(value)]:
        yield "memory", format_bytes(max(memory)), "at most"
    yield "time", format_duration(sum(time_breakdown(run).values())), ""


def loss_charts(run: RunView) -> Iterator[Html]:
    """The losses that share a unit, the whole run and its last half; the indexer's own where it is
    all that learns; rewards, of each task where there are several."""
    if "loss" not in run.metrics:
        if "indexer" in run.metrics:
            yield metric_chart(run, "indexer")
        if reward_metrics(run):
            yield reward_chart(run)
        return
    entropy = run.latest_positive_value("corpus", "unigram_entropy")
    rules = [ReferenceLine("unigram entropy", entropy)] if entropy else []
    curves = [run.curve(name) for name in LANGUAGE if name in run.metrics]
    yield chart(run, LOSS_DISPLAY, curves, *rules)
    if len(run.lines) >= 100:
        later = replace(LOSS_DISPLAY, title="Loss, the last half")
        yield chart(run, later, [last_half(curve) for curve in curves])


def other_charts(run: RunView) -> Iterator[Html]:
    """Every other metric in a picture of its own, also those this page has never heard of."""
    shown = (
        set(LANGUAGE) if "loss" in run.metrics else {"indexer", "held_out", *reward_metrics(run)}
    )
    if len(reward_metrics(run)) == 1:
        shown.add("reward")  # the same
    for name in run.metrics:
        if name not in shown:
            yield metric_chart(run, name)
    if (fast := throughput_series(run)).y:
        yield chart(run, metric_display("speed"), [fast])
    if (used := mfu_series(run)) is not None and used.y:
        yield chart(run, metric_display("mfu"), [used])


def evaluation_section(run: RunView) -> Html:
    held_out = run.curve("held_out")
    parts = []
    if held_out.y:
        rows = [
            (f"{step:,.0f}", format_number(x), f"{y:.4f}")
            for step, x, y in zip(held_out.step, held_out.x, held_out.y, strict=True)
        ]
        head = ("step", run.progress[0], "held-out loss, nats a token")
        parts.append(
            table(head, rows if len(rows) <= 12 else [*rows[:2], ("...",) * 3, *rows[-9:]], words=0)
        )
    parts += loss_by_source(run)
    parts += score_tables(run)
    return section("Evaluation", tag("div", *parts, class_="grid")) if parts else Html()


def loss_by_source(run: RunView) -> Iterator[Html]:
    """The held-out loss of each source, when it was first and last measured."""
    found = [
        (event.get("step", "?"), event["nats"])
        for event in run.events
        if event.get("kind") == "held_out" and isinstance(event.get("nats"), Mapping)
    ]
    told = [found[0], found[-1]] if len(found) > 1 else found

    def cell(value: object) -> str:
        return "" if (nats := parse_number_or_none(value)) is None else f"{nats:.3f}"

    if told:
        rows = [(name, *(cell(nats.get(name)) for _, nats in told)) for name in told[-1][1]]
        yield table(("held out, nats a token", *(f"step {step}" for step, _ in told)), rows)


def score_tables(run: RunView) -> Iterator[Html]:
    """What `evaluated` events measured: single numbers as a table, lists (by layer, by depth) as
    a row each."""
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
    return {str(place): parse_number_or_none(value) for place, value in enumerate(rest, start=1)}


def time_breakdown(run: RunView) -> dict[str, float]:
    """Where the seconds went, from the first start to the last word.

    A step that also evaluates took as much longer than the others as the evaluation took. What
    passed between two steps is saving and the like, or lost where the run was started anew.
    """
    plain = [line["seconds"] for line in run.lines if "seconds" in line and "held_out" not in line]
    usual = median(plain) if plain else 0.0
    starts = [e["time"] for e in run.events if e.get("kind") == "started" and "time" in e]
    ends = [e["time"] for e in run.events if e.get("kind") == "finished" and "time" in e]
    found = {
        "steps": 0.0,
        "evaluation": 0.0,
        "saving and the rest": 0.0,
        "stopped or repeated": 0.0,
    }
    last = min(starts, default=None)
    for line in run.lines:
        seconds, now = line.get("seconds", 0.0), line.get("time")
        beyond = max(0.0, seconds - usual) if "held_out" in line else 0.0
        found["steps"] += seconds - beyond
        found["evaluation"] += beyond
        if last is not None and now is not None:
            anew = any(last < start <= now for start in starts)
            between = "stopped or repeated" if anew else "saving and the rest"
            found[between] += max(0.0, now - last - seconds)
        last = last if now is None else now
    if ends and last is not None:
        found["saving and the rest"] += max(0.0, ends[-1] - last)
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def time_section(run: RunView) -> Html:
    times = [record["time"] for record in (*run.events, *run.lines) if "time" in record]
    days = ""
    if times:
        days = f"From {_moment(min(times))} to {_moment(max(times))} UTC."
    return join((stacked_bar(time_breakdown(run), format_duration), tag("p", days)))


def _moment(seconds: float) -> str:
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
        table((head, ""), rows, words=2)
        for head, rows in (("recipe", chosen), ("machine", list(hardware_rows(run))))
        if rows
    ]
    whole = details("The whole resolved recipe", tag("pre", run.recipe_text))
    return join((tag("div", *tables, class_="grid"), whole if run.recipe_text else ""))


def flatten(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """
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
    written = run.latest_event_value("started", "machine")
    for name, value in flatten(written).items() if isinstance(written, Mapping) else ():
        yield name, format_setting(value)
    for name, value in flatten(run.recipe).items():
        if name.startswith(("machine.", "parallel.")):
            yield name, format_setting(value)


def events_section(run: RunView) -> Html:
    rows = [
        (
            _moment(event["time"]) if "time" in event else "",
            str(event.get("kind", "")),
            ", ".join(
                f"{k} {format_setting(v)}" for k, v in event.items() if k not in ("time", "kind")
            ),
        )
        for event in run.events
    ]
    return details(f"{len(rows)} events", table(("time, UTC", "kind", ""), rows, words=3))
