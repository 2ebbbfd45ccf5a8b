"""Seed plots, stacked bars and heat maps as HTML and SVG."""

from collections.abc import Callable, Mapping, Sequence
from math import floor, isfinite, log10
from statistics import fmean, stdev

from paddock.dashboard.charts import colour_class
from paddock.dashboard.html import Html, join, tag
from paddock.dashboard.scale import AxisScale, fit_scale, format_number, tick_labels

WIDE, HIGH = 1000, 100  # in units of the SVG view box


def seed_plot(
    title: str, groups: Mapping[str, Sequence[float]], *, label: str, from_zero: bool = False
) -> Html:
    """One row per group: a dot per seed, a mark at the mean, a line of one standard deviation.

    With `from_zero` the axis starts at zero and bars are drawn; otherwise it fits the dots, which
    shows small differences but no proportions.
    """
    finite = {name: [v for v in values if isfinite(v)] for name, values in groups.items()}
    extent = [edge for values in finite.values() for edge in (*values, *_around(values))]
    across = fit_scale(extent, zero=from_zero, pad=0.06)
    rows = [
        join(
            (
                tag("div", name, class_="name"),
                tag("div", format_mean_std(values), class_="value"),
                _track(i, finite[name], across, from_zero),
            )
        )
        for i, (name, values) in enumerate(groups.items())
    ]
    ticks = across.ticks(5)
    marks = [
        tag("span", text, style=f"left:{100 * across.at(tick):.2f}%")
        for tick, text in zip(ticks, tick_labels(ticks), strict=True)
    ]
    foot = tag("div", join(marks), class_="x-ticks", aria_hidden="true")
    return tag(
        "figure",
        tag("figcaption", tag("b", title), " ", tag("span", label)),
        tag("div", join(rows), foot, class_="rows"),
        class_="seeds",
    )


def _around(values: Sequence[float]) -> tuple[float, ...]:
    """One standard deviation below and above the mean."""
    if len(values) < 2:
        return ()
    return fmean(values) - stdev(values), fmean(values) + stdev(values)


def format_mean_std(values: Sequence[float]) -> str:
    """Mean and standard deviation, both to the second significant digit of the deviation.

    >>> format_mean_std([0.573, 0.615, 0.575]), format_mean_std([2.0])
    ('0.588 ± 0.024', '2')
    >>> format_mean_std([1.0, float("nan")])
    '1 (1 of 2 not finite)'
    """
    finite = [value for value in values if isfinite(value)]
    if not finite:
        return "no value"
    lost = len(values) - len(finite)
    mean, spread = fmean(finite), stdev(finite) if len(finite) > 1 else 0.0
    text = format_number(mean)
    if spread:
        digits = max(0, 1 - floor(log10(spread)))
        text = f"{mean:,.{digits}f} ± {spread:,.{digits}f}"
    return text + (f" ({lost} of {len(values)} not finite)" if lost else "")


def _track(number: int, values: Sequence[float], across: AxisScale, from_zero: bool) -> Html:
    def at(value: float) -> str:
        return f"{WIDE * across.at(value):.1f}"

    grid = "".join(f"M{at(tick)} 0V{HIGH}" for tick in across.ticks(5))
    parts = [tag("path", d=grid, class_="grid")]
    if values:
        mean = fmean(values)
        if from_zero:
            parts.append(tag("path", d=f"M{at(0)} 22H{at(mean)}V78H{at(0)}Z", class_="bar"))
        parts.append(tag("path", d=f"M{at(mean)} 18V82", class_="mean"))
        if around := _around(values):
            parts.append(tag("path", d=f"M{at(around[0])} 50H{at(around[1])}", class_="spread"))
        dots = "".join(f"M{at(value)} 50h0" for value in values)
        parts.append(tag("path", d=dots, class_="dots"))
    return tag(
        "svg",
        join(parts),
        viewBox=f"0 0 {WIDE} {HIGH}",
        preserveAspectRatio="none",
        class_=f"series {colour_class(number)}",
        role="img",
        aria_label=", ".join(map(format_number, values)) or "no value",
    )


def stacked_bar(parts: Mapping[str, float], show: Callable[[float], str]) -> Html:
    """A bar whose segments are as wide as their share, with a legend."""
    whole = sum(parts.values()) or 1.0
    pieces = [
        tag("div", class_=colour_class(i), style=f"width:{100 * value / whole:.2f}%")
        for i, value in enumerate(parts.values())
    ]
    keys = [
        tag("span", tag("i", class_=colour_class(i)), f"{name} {show(value)} ({value / whole:.0%})")
        for i, (name, value) in enumerate(parts.items())
    ]
    bar = tag("div", join(pieces), class_="share", aria_hidden="true")
    return tag("figure", bar, tag("div", join(keys), class_="legend"))


def heat_map(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    *,
    low: float = 0.0,
    high: float = 1.0,
) -> Html:
    """A table whose cells are coloured by value, from `low` (background) to `high` (full colour).

    None is shown as not measured. Every cell also shows its number.
    """

    def cell(value: float | None) -> Html:
        if value is None or not isfinite(value):
            return tag("td", "-" if value is None else format_number(value), class_="none")
        level = min(1.0, max(0.0, (value - low) / (high - low)))
        strength = "strong" if level > 0.65 else "middle" if level > 0.45 else None
        return tag("td", format_number(value, 3), class_=strength, style=f"--level:{level:.3f}")

    head = tag("tr", tag("td"), join(tag("th", name, scope="col") for name in columns))
    body = [
        tag("tr", tag("th", name, scope="row"), join(cell(value) for value in row))
        for name, row in zip(rows, values, strict=True)
    ]
    drawn = tag("table", tag("thead", head), tag("tbody", join(body)), class_="heat")
    caption = tag(
        "figcaption",
        tag("b", title),
        " ",
        tag("span", f"{format_number(low)} to {format_number(high)}"),
    )
    return tag("figure", caption, tag("div", drawn, class_="scroll"))
