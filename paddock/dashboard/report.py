"""One run on one page: how it went, what it was, what it cost."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from paddock.dashboard.bars import heat_map, share_bar
from paddock.dashboard.curves import (
    NATS,
    chart,
    ends,
    final,
    last_half,
    look,
    metric_chart,
    reward_chart,
    rewarded,
    smoothing_of,
    speed,
    utilisation,
)
from paddock.dashboard.figure import Rule, smooth_switch
from paddock.dashboard.folder import RunFolder, number, pretty, read_run
from paddock.dashboard.html import Html, folded, joined, page, section, table, tag, tiles
from paddock.dashboard.scale import short, size, span

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
    file.write_text(page(run.name, *report(run, clock())), "utf-8", "replace")
    return file


def report(run: RunFolder, now: float) -> Iterator[Html]:
    status = run.status(now)
    yield tag("h1", run.name, " ", tag("span", status, class_=f"status {status}"))
    yield tag("p", summary(run), class_="lead")
    yield joined(tag("p", f"Note: {text}.", class_="note") for text in notes(run, status))
    if run.lines:
        yield tiles(headline(run))
        yield section("Learning", smooth_switch(smoothing_of(run)), *learning(run))
    yield evaluation(run)
    if run.lines:
        yield section("Further curves", tag("div", joined(further(run)), class_="grid"))
        yield section("Time", timing(run))
    yield section("Recipe and machine", recipe(run))
    yield section("Events", events(run))


def summary(run: RunFolder) -> str:
    flat = flattened(run.recipe)
    origin = flat.get("start.preset") or flat.get("start.folder") or "unknown"
    planned = run.steps_planned
    done = f"Step {run.steps_done:,}" + (f" of {planned:,}" if planned else "")
    parts = [f"Stage {flat.get('stage', 'unknown')}", f"from {origin}"]
    parts += [f"seed {flat['seed']}"] if "seed" in flat else []
    return f"{', '.join(parts)}. {done}."


def notes(run: RunFolder, status: str) -> Iterator[str]:
    yield from run.complaints
    if not run.lines:
        yield "no step was finished"
    if status == "stopped" and (run.path / "not-finite.npz").is_file():
        yield "a loss or gradient was not finite; the batch lies in not-finite.npz"


def headline(run: RunFolder) -> Iterator[tuple[str, str, str]]:
    held_out, entropy = run.curve("held_out").y, run.positive("corpus", "unigram_entropy")
    if held_out:
        beside = "nats a token"
        if entropy:
            beside = f"{held_out[-1] / entropy:.0%} of the unigram entropy, {short(entropy)}"
        yield "held-out loss", short(held_out[-1]), beside
    for name in ("loss", "indexer"):
        if name in run.metrics:
            value, said = final(run.curve(name))
            yield look(name).title.lower(), short(value), said
    for name in rewarded(run):
        first, last = ends(run.curve(name))
        yield (
            look(name).title.lower(),
            f"{first:.2f} \N{RIGHTWARDS ARROW} {last:.2f}",
            "first and last twentieth",
        )
    if run.tokens:
        yield "tokens", short(run.tokens[-1]), f"{run.steps_done:,} steps"
    if (fast := speed(run)).y:
        yield "speed", short(median(fast.y)), "tokens a second, median"
    if (used := utilisation(run)) is not None and used.y:
        yield "MFU", f"{median(used.y):.1f} %", "median"
    if memory := [value for value in run.curve("memory_bytes").y if isfinite(value)]:
        yield "memory", size(max(memory)), "at most"
    yield "time", span(sum(spent(run).values())), ""


def learning(run: RunFolder) -> Iterator[Html]:
    """The losses that share a unit, the whole run and its last half; the indexer's own where it is
    all that learns; rewards, of each task where there are several."""
    if "loss" not in run.metrics:
        if "indexer" in run.metrics:
            yield metric_chart(run, "indexer")
        if rewarded(run):
            yield reward_chart(run)
        return
    entropy = run.positive("corpus", "unigram_entropy")
    rules = [Rule("unigram entropy", entropy)] if entropy else []
    curves = [run.curve(name) for name in LANGUAGE if name in run.metrics]
    yield chart(run, NATS, curves, *rules)
    if len(run.lines) >= 100:
        later = replace(NATS, title="Loss, the last half")
        yield chart(run, later, [last_half(curve) for curve in curves])


def further(run: RunFolder) -> Iterator[Html]:
    """Every other metric in a picture of its own, also those this page has never heard of."""
    shown = set(LANGUAGE) if "loss" in run.metrics else {"indexer", "held_out", *rewarded(run)}
    if len(rewarded(run)) == 1:
        shown.add("reward")  # the same
    for name in run.metrics:
        if name not in shown:
            yield metric_chart(run, name)
    if (fast := speed(run)).y:
        yield chart(run, look("speed"), [fast])
    if (used := utilisation(run)) is not None and used.y:
        yield chart(run, look("mfu"), [used])


def evaluation(run: RunFolder) -> Html:
    held_out = run.curve("held_out")
    parts = []
    if held_out.y:
        rows = [
            (f"{step:,.0f}", short(x), f"{y:.4f}")
            for step, x, y in zip(held_out.step, held_out.x, held_out.y, strict=True)
        ]
        head = ("step", run.progress[0], "held-out loss, nats a token")
        parts.append(
            table(head, rows if len(rows) <= 12 else [*rows[:2], ("...",) * 3, *rows[-9:]], words=0)
        )
    parts += by_source(run)
    parts += scores(run)
    return section("Evaluation", tag("div", *parts, class_="grid")) if parts else Html()


def by_source(run: RunFolder) -> Iterator[Html]:
    """The held-out loss of each source, when it was first and last measured."""
    found = [
        (event.get("step", "?"), event["nats"])
        for event in run.events
        if event.get("kind") == "held_out" and isinstance(event.get("nats"), Mapping)
    ]
    told = [found[0], found[-1]] if len(found) > 1 else found

    def cell(value: object) -> str:
        return "" if (nats := number(value)) is None else f"{nats:.3f}"

    if told:
        rows = [(name, *(cell(nats.get(name)) for _, nats in told)) for name in told[-1][1]]
        yield table(("held out, nats a token", *(f"step {step}" for step, _ in told)), rows)


def scores(run: RunFolder) -> Iterator[Html]:
    """What `evaluated` events measured: single numbers as a table, lists (by layer, by depth) as
    a row each."""
    named = [
        (str(event.get("label") or f"step {event.get('step', '?')}"), event["scores"])
        for event in run.events
        if event.get("kind") == "evaluated" and isinstance(event.get("scores"), Mapping)
    ]
    kinds = {name: value for _, found in named for name, value in found.items()}
    single = [name for name, value in kinds.items() if number(value) is not None]
    if single:
        rows = [
            (label, *("" if (v := number(found.get(n))) is None else short(v) for n in single))
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
        return {str(key): number(value) for key, value in values.items()}
    rest = values if isinstance(values, list) else [values]
    return {str(place): number(value) for place, value in enumerate(rest, start=1)}


def spent(run: RunFolder) -> dict[str, float]:
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


def timing(run: RunFolder) -> Html:
    times = [record["time"] for record in (*run.events, *run.lines) if "time" in record]
    days = ""
    if times:
        days = f"From {_moment(min(times))} to {_moment(max(times))} UTC."
    return joined((share_bar(spent(run), span), tag("p", days)))


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


SETTINGS = (
    "stage",
    "start.preset",
    "start.folder",
    "steps",
    "seed",
    "stream.context",
    "stream.batch_tokens",
    "optim.kind",
    "optim.split",
    "optim.lr",
    "optim.schedule",
    "optim.weight_decay",
    "loss.mtp_depths",
)


def recipe(run: RunFolder) -> Html:
    flat = flattened(run.recipe)
    chosen = [(name, pretty(flat[name])) for name in SETTINGS if name in flat]
    tables = [
        table((head, ""), rows, words=2)
        for head, rows in (("recipe", chosen), ("machine", list(machine(run))))
        if rows
    ]
    whole = folded("The whole resolved recipe", tag("pre", run.recipe_text))
    return joined((tag("div", *tables, class_="grid"), whole if run.recipe_text else ""))


def flattened(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """
    >>> flattened({"steps": 9, "optim": {"lr": 0.1}})
    {'steps': 9, 'optim.lr': 0.1}
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= (
            flattened(value, f"{above}{name}.")
            if isinstance(value, Mapping)
            else {above + name: value}
        )
    return found


def machine(run: RunFolder) -> Iterator[tuple[str, str]]:
    written = run.fact("started", "machine")
    for name, value in flattened(written).items() if isinstance(written, Mapping) else ():
        yield name, pretty(value)
    for name, value in flattened(run.recipe).items():
        if name.startswith(("machine.", "parallel.")):
            yield name, pretty(value)


def events(run: RunFolder) -> Html:
    rows = [
        (
            _moment(event["time"]) if "time" in event else "",
            str(event.get("kind", "")),
            ", ".join(f"{k} {pretty(v)}" for k, v in event.items() if k not in ("time", "kind")),
        )
        for event in run.events
    ]
    return folded(f"{len(rows)} events", table(("time, UTC", "kind", ""), rows, words=3))
