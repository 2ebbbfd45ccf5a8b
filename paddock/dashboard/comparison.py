"""Several runs on one page: arms of an ablation, each with its seeds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite, sqrt
from pathlib import Path
from statistics import fmean, variance

from paddock.dashboard.bar_charts import format_mean_std, seed_plot
from paddock.dashboard.charts import ChartAxis, line_chart
from paddock.dashboard.html import Html, join, page, section, table, tag
from paddock.dashboard.metrics import (
    final_value,
    last_half,
    metric_display,
    smoothing_window,
    starts_late,
)
from paddock.dashboard.run_report import flatten
from paddock.dashboard.run_view import ReportError, RunView, format_setting, read_run
from paddock.dashboard.scale import format_number
from paddock.dashboard.series import MetricSeries, average_runs, smooth_ema

Arms = Mapping[str, Sequence[RunView]]


def write_comparison(
    arms: Mapping[str, Sequence[str | Path]], out: str | Path, *, metric: str | None = None
) -> Path:
    """Write the page that compares `arms`, each a name and the run folders of its seeds.

    `metric` decides; by default the held-out loss, or the loss where nothing was held out.
    """
    found = {name: [read_run(folder) for folder in folders] for name, folders in arms.items()}
    if sum(map(len, found.values())) < 2 or not all(found.values()):
        raise ReportError("a comparison needs two runs, and every arm one")
    chosen = metric or _common(found)
    for run in (run for runs in found.values() for run in runs):
        if chosen not in run.metrics:
            held = ", ".join(run.metrics) or "no step at all"
            raise ReportError(f"{run.path}: no metric '{chosen}'; it has {held}")
    file = Path(out)
    names = ", ".join(found) if len(found) <= 4 else f"{len(found)} arms"
    title = f"{metric_display(chosen).title}: {names}"
    file.write_text(page(title, tag("h1", title), *comparison(found, chosen)), "utf-8", "replace")
    return file


def _common(arms: Arms) -> str:
    runs = [run for found in arms.values() for run in found]
    for metric in ("held_out", "loss", "indexer"):
        if all(metric in run.metrics for run in runs):
            return metric
    raise ReportError("the runs share none of held_out, loss, indexer; name a metric")


def comparison(arms: Arms, metric: str) -> Iterator[Html]:
    shown = metric_display(metric)
    ends = {name: [final_value(run.curve(metric)) for run in runs] for name, runs in arms.items()}
    finals = {name: [value for value, _ in found] for name, found in ends.items()}
    said = next(iter(ends.values()))[0][1]
    runs = sum(map(len, arms.values()))
    yield tag("p", f"{runs} runs in {len(arms)} arms, by the {said} of each.", class_="lead")
    yield join(tag("p", f"Note: {text}.", class_="note") for text in comparison_notes(arms))
    yield seed_plot(f"{shown.title}, {said}", finals, label=shown.unit)
    explained = (
        "A dot for each run, a bar at their mean, a line one standard deviation either side."
    )
    yield tag("p", explained)
    yield significance_table(finals)
    yield section("Curves", *comparison_curves(arms, metric))
    yield section("What differs", settings_diff(arms))
    yield section(
        "Runs",
        table(
            ("arm", "run", "seed", "steps", "tokens", shown.title.lower()),
            _rows(arms, finals),
            words=2,
        ),
    )


def comparison_notes(arms: Arms) -> Iterator[str]:
    """What makes a comparison unfair."""
    tokens = {name: fmean((run.tokens or [0.0])[-1] for run in runs) for name, runs in arms.items()}
    if min(tokens.values()) < 0.99 * max(tokens.values()):
        said = ", ".join(f"{name} {format_number(count)}" for name, count in tokens.items())
        yield f"the arms did not see equally many tokens: {said}"
    for name, runs in arms.items():
        for run in runs:
            if run.steps_planned and run.steps_done < run.steps_planned:
                stand = f"step {run.steps_done:,} of {run.steps_planned:,}"
                yield f"{name}: {run.name} stands at {stand}"
            yield from (f"{name}: {run.name}: {complaint}" for complaint in run.warnings)
        if changed := _differing([flatten(run.recipe) for run in runs]) - MAY_DIFFER_IN_ARM:
            yield f"the runs of {name} differ in {', '.join(sorted(changed))}"


MAY_DIFFER_IN_ARM = {"seed", "init.checkpoint"}  # runs of one arm may differ in these


def significance_table(finals: Mapping[str, Sequence[float]]) -> Html:
    """Every arm against the first, with what chance alone would do to the difference."""
    first, *others = finals
    rows = [(first, format_mean_std(finals[first]), "", "")]
    for name in others:
        gap = fmean(finals[name]) - fmean(finals[first])
        chance = _standard_error(finals[name], finals[first])
        share = f"{abs(gap) / chance:.1f}" if chance and isfinite(chance) else ""
        said = f"{gap:+.4f}" if isfinite(gap) else "not finite"
        rows.append((name, format_mean_std(finals[name]), said, share))
    head = ("arm", "mean ± deviation", f"against {first}", "in standard errors")
    return table(head, rows)


def _standard_error(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Of the difference of two means; None where a group is too small to vary.

    >>> _standard_error([1.0, 3.0], [2.0, 4.0]), _standard_error([1.0], [2.0, 3.0])
    (1.4142135623730951, None)
    """
    if min(len(one), len(other)) < 2:
        return None
    return sqrt(variance(one) / len(one) + variance(other) / len(other))


def comparison_curves(arms: Arms, metric: str) -> Iterator[Html]:
    """The metric that decides, and the loss where that is another."""
    for name in dict.fromkeys((metric, "loss")):
        if not all(name in run.metrics for runs in arms.values() for run in runs):
            continue
        shown = metric_display(name)
        drawn = [_arm(arm, [run.curve(name) for run in runs]) for arm, runs in arms.items()]
        yield _chart(shown.title, drawn, arms, shown.axis)
        half = [last_half(curve) for curve in drawn]
        if all(len(curve.x) > 1 for curve in half):
            yield _chart(f"{shown.title}, the last half", half, arms, shown.axis)
    yield tag(
        "p",
        "The line is the mean of an arm's runs, the band reaches from the lowest to the highest; a "
        "curve of many points was smoothed over a hundredth of its run first. An arm ends where "
        "its shortest run does.",
    )


def _chart(title: str, drawn: list[MetricSeries], arms: Arms, y: ChartAxis) -> Html:
    along = {run.progress[0] for runs in arms.values() for run in runs}
    x = ChartAxis(along.pop() if len(along) == 1 else "steps", zero=not starts_late(drawn))
    return line_chart(title, drawn, x=x, y=y)


def _arm(name: str, runs: Sequence[MetricSeries]) -> MetricSeries:
    """Smoothed run by run, so that the band is that of the runs and not of their noise."""
    return average_runs(
        name,
        [
            run if run.marks else replace(run, y=smooth_ema(run.y, smoothing_window(len(run.y))))
            for run in runs
        ],
    )


def settings_diff(arms: Arms) -> Html:
    """The settings in which the arms are unlike."""
    recipes = {name: flatten(runs[0].recipe) for name, runs in arms.items()}
    changed = sorted(_differing(list(recipes.values())) - {"seed"})
    if not changed:
        return tag("p", "The recipes are the same.")
    rows = [
        (
            key,
            *(format_setting(recipe[key]) if key in recipe else "" for recipe in recipes.values()),
        )
        for key in changed
    ]
    return table(("setting", *recipes), rows, words=1 + len(recipes))


def _differing(recipes: Sequence[Mapping[str, object]]) -> set[str]:
    """
    >>> sorted(_differing([{"lr": 1, "seed": 0}, {"lr": 2, "seed": 0, "clip": 1}]))
    ['clip', 'lr']
    """
    keys = {key for recipe in recipes for key in recipe}
    missing = object()
    return {
        key
        for key in keys
        if any(recipe.get(key, missing) != recipes[0].get(key, missing) for recipe in recipes)
    }


def _rows(arms: Arms, finals: Mapping[str, Sequence[float]]) -> Iterator[tuple[str, ...]]:
    for name, runs in arms.items():
        for run, value in zip(runs, finals[name], strict=True):
            yield (
                name,
                run.name,
                str(run.recipe.get("seed", "")),
                f"{run.steps_done:,}",
                format_number(run.tokens[-1]) if run.tokens else "",
                f"{value:.4f}",
            )
