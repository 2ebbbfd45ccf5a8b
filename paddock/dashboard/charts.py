"""Line charts as SVG with HTML labels.

The SVG stretches with the page while lines and labels keep their size, so that one chart serves
desktop and phone. Colours are in page.css, the hover readout in page.js; a chart is readable
without either.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TypeVar

from paddock.dashboard.html import Html, join, tag
from paddock.dashboard.scale import AxisScale, fit_scale, format_number, tick_labels
from paddock.dashboard.series import MetricSeries, downsample, smooth_ema

SIDE = 1000  # width and height of the SVG view box
COLUMNS = 250  # of a downsampled curve
DOTS = 60  # with more points no dots are drawn: they would hide the line
COLOURS = 4  # in page.css, distinguishable by everyone; further series differ by dashes


@dataclass(frozen=True, slots=True)
class ChartAxis:
    label: str
    log: bool = False
    zero: bool = False  # starts at zero; otherwise fits the data


@dataclass(frozen=True, slots=True)
class ReferenceLine:
    """A horizontal line to compare curves with."""

    name: str
    y: float


def line_chart(
    title: str,
    series: Sequence[MetricSeries],
    *,
    x: ChartAxis,
    y: ChartAxis,
    rules: Sequence[ReferenceLine] = (),
    smooth: float = 0,
) -> Html:
    """Curves over a common axis, with a legend if there are several.

    `smooth` is the window of a moving average drawn over each curve, which `smoothing_toggle` turns
    off; series with marks or bands are not smoothed. Values that cannot be drawn (not finite, or
    not positive on a logarithmic axis) are counted below the chart.
    """
    across = fit_scale((value for one in series for value in one.x), log=x.log, zero=x.zero)
    heights = [v for one in series for v in (*one.y, *one.low, *one.high)]
    upwards = fit_scale([*heights, *(rule.y for rule in rules)], log=y.log, zero=y.zero, pad=0.04)
    curves = [_Curve(i, one, smooth) for i, one in enumerate(series)]
    drawing = tag(
        "svg",
        _grid(across, upwards),
        join(_rule(rule, upwards) for rule in rules),
        join(curve.drawn(across, upwards) for curve in curves),
        viewBox=f"0 0 {SIDE} {SIDE}",
        preserveAspectRatio="none",
        role="img",
        aria_label=_description(title, series, rules, x.label),
    )
    marks = tick_labels(upwards.ticks())
    return tag(
        "figure",
        tag("figcaption", tag("b", title), " ", tag("span", y.label)),
        _legend(series) if len(series) > 1 else "",
        tag(
            "div",
            _ticks("y", upwards, marks),
            tag("div", drawing, join(_rule_names(rules, upwards)), class_="plot", tabindex=0),
            _ticks("x", across, tick_labels(across.ticks())),
            tag("div", f"{x.label}{', logarithmic' * x.log}", class_="x-label"),
            class_="frame",
            style=f"--margin:{max((len(mark) for mark in marks), default=1)}ch",
        ),
        _hidden_values(series, y.log),
        class_="chart",
        data_chart=json.dumps(
            {
                "x": [across.low, across.high, x.log],
                "y": [upwards.low, upwards.high, y.log],
                "label": x.label,
                "series": [curve.data() for curve in curves],
            }
        ),
    )


def smoothing_toggle(points: float) -> Html:
    """Checkbox that turns the smoothing of all charts of a page on and off."""
    checkbox = tag("input", type="checkbox", checked="checked", id="smooth")
    return tag(
        "label",
        checkbox,
        f"Smoothing over about {points:,.0f} step{'s' * (points > 1)}; single steps are faint",
    )


class _Curve:
    """A series as it is drawn: downsampled, with its moving average."""

    def __init__(self, number: int, series: MetricSeries, smooth: float) -> None:
        average = smooth > 1 and not series.marks and not series.low and len(series.y) > smooth
        self.kept = downsample(series.x, series.y, COLUMNS)
        self.smooth = smooth_ema(series.y, smooth) if average else []
        self.series, self.colour = series, colour_class(number)

    def drawn(self, across: AxisScale, upwards: AxisScale) -> Html:
        def line(values: Sequence[float], class_: str) -> Html:
            points = _points(self.series.x, values, self.kept, across, upwards)
            return _path(_line(points), class_)

        one = self.series
        parts = []
        if one.low:
            low = _points(one.x, one.low, self.kept, across, upwards)
            high = _points(one.x, one.high, self.kept, across, upwards)
            parts.append(_path(_band(low, high), "band"))
        parts.append(line(one.y, "raw" if self.smooth else "line"))
        if self.smooth:
            parts.append(line(self.smooth, "smooth"))
        if len(one.y) == 1 or (one.marks and len(one.y) <= DOTS):
            dots = _points(one.x, one.y, self.kept, across, upwards)
            parts.append(_path(_dots(dots), "dots"))
        return tag("g", join(parts), class_=f"series {self.colour}")

    def data(self) -> dict[str, object]:
        """Data of the hover readout."""
        columns = {"x": self.series.x, "y": self.series.y, "smooth": self.smooth}
        columns |= {"low": self.series.low, "high": self.series.high, "step": self.series.step}
        return {
            "name": self.series.name,
            "colour": self.colour,
            **{name: [_brief(c[i]) for i in self.kept] for name, c in columns.items() if c},
        }


def colour_class(number: int) -> str:
    """CSS classes (colour and dash) of the series with this number."""
    return f"c{number % COLOURS} d{number // COLOURS % 3}"


def _brief(value: float) -> float | None:
    return float(f"{value:.6g}") if isfinite(value) else None


Point = tuple[float, float]
T = TypeVar("T")


def _points(
    x: Sequence[float],
    y: Sequence[float],
    kept: Sequence[int],
    across: AxisScale,
    upwards: AxisScale,
) -> list[Point | None]:
    """Points in view-box units; None where a value cannot be drawn."""
    shown = [isfinite(y[i]) and (y[i] > 0 or not upwards.log) for i in kept]
    shown = [ok and (x[i] > 0 or not across.log) for ok, i in zip(shown, kept, strict=True)]
    return [
        (SIDE * across.at(x[i]), SIDE * (1 - upwards.at(y[i]))) if ok else None
        for ok, i in zip(shown, kept, strict=True)
    ]


def _pieces(values: Sequence[T | None]) -> Iterator[list[T]]:
    """Runs of values between gaps."""
    piece: list[T] = []
    for value in [*values, None]:
        if value is not None:
            piece.append(value)
        elif piece:
            yield piece
            piece = []


def _line(points: Sequence[Point | None]) -> str:
    """SVG path of a line. A single point between gaps is a line of zero length with round caps."""
    return "".join(
        f"M{_joined(piece)}" if len(piece) > 1 else f"M{_joined(piece)}h0"
        for piece in _pieces(points)
    )


def _dots(points: Sequence[Point | None]) -> str:
    return "".join(f"M{_joined([point])}h0" for point in points if point is not None)


def _band(low: Sequence[Point | None], high: Sequence[Point | None]) -> str:
    """SVG path of the area between two lines."""
    pairs = [
        None if below is None or above is None else (below, above)
        for below, above in zip(low, high, strict=True)
    ]
    return "".join(
        f"M{_joined([*(pair[0] for pair in piece), *(pair[1] for pair in reversed(piece))])}Z"
        for piece in _pieces(pairs)
    )


def _joined(points: Sequence[Point]) -> str:
    return "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _path(d: str, class_: str) -> Html:
    return tag("path", d=d, class_=class_)


def _grid(across: AxisScale, upwards: AxisScale) -> Html:
    rows = "".join(f"M0 {SIDE * (1 - upwards.at(tick)):.1f}H{SIDE}" for tick in upwards.ticks())
    columns = "".join(f"M{SIDE * across.at(tick):.1f} 0V{SIDE}" for tick in across.ticks())
    return _path(rows + columns, "grid")


def _rule(rule: ReferenceLine, upwards: AxisScale) -> Html:
    return _path(f"M0 {SIDE * (1 - upwards.at(rule.y)):.1f}H{SIDE}", "rule")


def _rule_names(rules: Sequence[ReferenceLine], upwards: AxisScale) -> Iterator[Html]:
    """Labels above their lines, or below if the line above is too close."""
    taken: list[float] = []
    for rule in sorted(rules, key=lambda rule: -rule.y):
        top = 1 - upwards.at(rule.y)
        below = top < 0.1 or any(top - other < 0.1 for other in taken)
        taken.append(top)
        text = f"{rule.name} {format_number(rule.y)}"
        yield tag("span", text, class_=f"rule{' below' * below}", style=f"top:{100 * top:.2f}%")


def _ticks(side: str, scale: AxisScale, texts: list[str]) -> Html:
    positions = [scale.at(tick) for tick in scale.ticks()]
    edge = "left" if side == "x" else "bottom"
    marks = [
        tag("span", text, style=f"{edge}:{100 * position:.2f}%")
        for position, text in zip(positions, texts, strict=True)
    ]
    return tag("div", join(marks), class_=f"{side}-ticks", aria_hidden="true")


def _legend(series: Sequence[MetricSeries]) -> Html:
    keys = [
        tag(
            "button", tag("i", class_=colour_class(i)), one.name, type="button", aria_pressed="true"
        )
        for i, one in enumerate(series)
    ]
    return tag("div", join(keys), class_="legend")


def _description(
    title: str, series: Sequence[MetricSeries], rules: Sequence[ReferenceLine], x: str
) -> str:
    """The chart in words, for screen readers."""
    parts = []
    for one in series:
        finite = [(x, y) for x, y in zip(one.x, one.y, strict=True) if isfinite(y)]
        if finite:
            (first_x, first), (last_x, last) = finite[0], finite[-1]
            lowest, highest = min(y for _, y in finite), max(y for _, y in finite)
            parts.append(
                f"{one.name} from {format_number(first)} at {format_number(first_x)} {x} "
                f"to {format_number(last)} at {format_number(last_x)}, "
                f"lowest {format_number(lowest)}, highest {format_number(highest)}"
            )
        else:
            parts.append(f"{one.name} has no value")
    parts += [f"{rule.name} {format_number(rule.y)}" for rule in rules]
    return f"{title}: {'; '.join(parts)}."


def _hidden_values(series: Sequence[MetricSeries], log: bool) -> Html:
    """A note on the values that cannot be drawn, by series."""
    lines = []
    for one in series:
        hidden = [
            (step, y)
            for step, y in zip(one.step or one.x, one.y, strict=True)
            if not isfinite(y) or (log and y <= 0)
        ]
        if hidden:
            (at, value), more = hidden[0], len(hidden) - 1
            also = f" and {more} more" if more else ""
            lines.append(
                tag(
                    "p",
                    f"Not shown: {one.name} {format_number(value)} at {format_number(at)}{also}.",
                )
            )
    return join(lines)
