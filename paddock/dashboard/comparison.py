"""Comparison report: arms of an ablation, each with the runs of its seeds."""

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
DEFAULT_METRICS = ("val_loss", "loss", "indexer_loss")  # the first that all runs have


def write_comparison(
    arms: Mapping[str, Sequence[str | Path]], out: str | Path, *, metric: str | None = None
) -> Path:
    """Write the report that compares `arms`, each a name with the run folders of its seeds.

    `metric` is what is compared; by default the validation loss, or the loss without validation.
    Raises ReportError with fewer than two runs or if a run lacks the metric.
    """
    found = {name: [read_run(folder) for folder in folders] for name, folders in arms.items()}
    if sum(map(len, found.values())) < 2 or not all(found.values()):
        raise ReportError("a comparison needs at least two runs, and every arm at least one")
    chosen = metric or _common(found)
    for run in (run for runs in found.values() for run in runs):
        if chosen not in run.metrics:
            known = ", ".join(run.metrics) or "none"
            raise ReportError(f"{run.path}: metric '{chosen}' not found; metrics: {known}")
    file = Path(out)
    names = ", ".join(found) if len(found) <= 4 else f"{len(found)} arms"
    title = f"{metric_display(chosen).title}: {names}"
    file.write_text(page(title, tag("h1", title), *comparison(found, chosen)), "utf-8", "replace")
    return file


def _common(arms: Arms) -> str:
    runs = [run for found in arms.values() for run in found]
    for metric in DEFAULT_METRICS:
        if all(metric in run.metrics for run in runs):
            return metric
    raise ReportError(
        f"the runs have none of {', '.join(DEFAULT_METRICS)} in common; choose a metric"
    )


def comparison(arms: Arms, metric: str) -> Iterator[Html]:
    shown = metric_display(metric)
    ends = {name: [final_value(run.curve(metric)) for run in runs] for name, runs in arms.items()}
    finals = {name: [value for value, _ in found] for name, found in ends.items()}
    meaning = next(iter(ends.values()))[0][1]
    runs = sum(map(len, arms.values()))
    yield tag("p", f"{runs} runs in {len(arms)} arms, compared by {meaning}.", class_="lead")
    yield join(tag("p", f"Note: {text}.", class_="note") for text in comparison_notes(arms))
    yield seed_plot(f"{shown.title}, {meaning}", finals, label=shown.unit)
    yield tag("p", "Dots: runs. Bar: mean. Line: one standard deviation either side.")
    yield significance_table(finals)
    yield section("Curves", *comparison_curves(arms, metric))
    yield section("Settings that differ", settings_diff(arms))
    yield section(
        "Runs",
        table(
            ("arm", "run", "seed", "steps", "tokens", shown.title.lower()),
            _rows(arms, finals),
            text_columns=2,
        ),
    )


def comparison_notes(arms: Arms) -> Iterator[str]:
    """What makes the comparison unfair."""
    tokens = {name: fmean((run.tokens or [0.0])[-1] for run in runs) for name, runs in arms.items()}
    if min(tokens.values()) < 0.99 * max(tokens.values()):
        counts = ", ".join(f"{name} {format_number(count)}" for name, count in tokens.items())
        yield f"arms trained on different numbers of tokens: {counts}"
    for name, runs in arms.items():
        for run in runs:
            if run.steps_planned and run.steps_done < run.steps_planned:
                step = f"step {run.steps_done:,} of {run.steps_planned:,}"
                yield f"{name}: {run.name} is at {step}"
            yield from (f"{name}: {run.name}: {warning}" for warning in run.warnings)
        if changed := _differing([flatten(run.recipe) for run in runs]) - MAY_DIFFER_IN_ARM:
            yield f"the runs of {name} differ in {', '.join(sorted(changed))}"


MAY_DIFFER_IN_ARM = {"seed", "init.checkpoint"}  # runs of one arm may differ in these


def significance_table(finals: Mapping[str, Sequence[float]]) -> Html:
    """Every arm against the first: difference of the means, also in standard errors."""
    first, *others = finals
    rows = [(first, format_mean_std(finals[first]), "", "")]
    for name in others:
        difference = fmean(finals[name]) - fmean(finals[first])
        error = _standard_error(finals[name], finals[first])
        ratio = f"{abs(difference) / error:.1f}" if error and isfinite(error) else ""
        text = f"{difference:+.4f}" if isfinite(difference) else "not finite"
        rows.append((name, format_mean_std(finals[name]), text, ratio))
    head = ("arm", "mean ± SD", f"difference to {first}", "difference / SE")
    return table(head, rows)


def _standard_error(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Standard error of the difference of two means; None if a group has one value.

    >>> _standard_error([1.0, 3.0], [2.0, 4.0]), _standard_error([1.0], [2.0, 3.0])
    (1.4142135623730951, None)
    """
    if min(len(one), len(other)) < 2:
        return None
    return sqrt(variance(one) / len(one) + variance(other) / len(other))


def comparison_curves(arms: Arms, metric: str) -> Iterator[Html]:
    """Curves of the compared metric, and of the loss if that is another."""
    for name in dict.fromkeys((metric, "loss")):
        if not all(name in run.metrics for runs in arms.values() for run in runs):
            continue
        shown = metric_display(name)
        drawn = [_arm(arm, [run.curve(name) for run in runs]) for arm, runs in arms.items()]
        yield _chart(shown.title, drawn, arms, shown.axis)
        half = [last_half(curve) for curve in drawn]
        if all(len(curve.x) > 1 for curve in half):
            yield _chart(f"{shown.title}, second half", half, arms, shown.axis)
    yield tag(
        "p",
        "Line: mean of an arm's runs. Band: lowest to highest run. Curves with many points are "
        "smoothed over 1 % of the run first. An arm ends with its shortest run.",
    )


def _chart(title: str, drawn: list[MetricSeries], arms: Arms, y: ChartAxis) -> Html:
    axes = {run.progress[0] for runs in arms.values() for run in runs}
    x = ChartAxis(axes.pop() if len(axes) == 1 else "steps", zero=not starts_late(drawn))
    return line_chart(title, drawn, x=x, y=y)


def _arm(name: str, runs: Sequence[MetricSeries]) -> MetricSeries:
    """Mean of an arm's runs, each smoothed first: the band shows their spread, not their noise."""
    return average_runs(
        name,
        [
            run if run.marks else replace(run, y=smooth_ema(run.y, smoothing_window(len(run.y))))
            for run in runs
        ],
    )


def settings_diff(arms: Arms) -> Html:
    """Table of the settings in which the arms differ."""
    recipes = {name: flatten(runs[0].recipe) for name, runs in arms.items()}
    changed = sorted(_differing(list(recipes.values())) - {"seed"})
    if not changed:
        return tag("p", "The recipes are identical.")
    rows = [
        (
            key,
            *(format_setting(recipe[key]) if key in recipe else "" for recipe in recipes.values()),
        )
        for key in changed
    ]
    return table(("setting", *recipes), rows, text_columns=1 + len(recipes))


def _differing(recipes: Sequence[Mapping[str, object]]) -> set[str]:
    """Settings that are not equal in all recipes.

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
