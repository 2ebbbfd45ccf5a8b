"""Metric series: smoothing, downsampling, averaging over seeds.

Non-finite values stay in a series and are drawn as gaps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isfinite
from statistics import fmean


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSeries:
    """One curve.

    `low` and `high` are a band around it, `step` the training step of each point, and `marks` says
    that points are few and each is drawn as a dot.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    step: Sequence[float] = ()
    marks: bool = False


def smooth_ema(values: Sequence[float], points: float) -> list[float]:
    """Bias-corrected exponential moving average over about `points` points.

    >>> smooth_ema([4.0, 8.0], points=3)
    [4.0, 6.666666666666667]
    >>> smooth_ema([5.0, float("nan"), 5.0], points=9)
    [5.0, nan, 5.0]
    """
    decay = 1 - 2 / (points + 1)
    total = weight = 0.0
    found = []
    for value in values:
        if isfinite(value):
            total, weight = decay * total + value, decay * weight + 1
        found.append(total / weight if isfinite(value) else value)
    return found


def downsample(x: Sequence[float], y: Sequence[float], columns: int) -> list[int]:
    """Indices of points to draw so that a chart of `columns` pixels looks the same.

    Keeps the first, lowest, highest, last and first non-finite point of every column, so that no
    spike or gap is lost; all points if they are few. `x` must not decrease.

    >>> downsample([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 1, 9, 1, 1, 1, 1, 0, 1, 1], columns=2)
    [0, 2, 4, 5, 7, 8, 9]
    """
    if len(x) <= 4 * columns:
        return list(range(len(x)))
    width = (x[-1] - x[0]) / columns or 1.0
    kept: set[int] = set()
    for _, group in groupby(range(len(x)), key=lambda i: int((x[i] - x[0]) / width)):
        column = list(group)
        finite = [i for i in column if isfinite(y[i])]
        gap = next((i for i in column if not isfinite(y[i])), column[0])
        kept |= {column[0], gap, column[-1]}
        if finite:
            kept |= {min(finite, key=y.__getitem__), max(finite, key=y.__getitem__)}
    return sorted(kept)


def average_runs(name: str, runs: Sequence[MetricSeries]) -> MetricSeries:
    """Mean of several runs with a band from lowest to highest, at steps that all runs have.

    A mean over fewer runs would jump where one of them stops.

    >>> a = MetricSeries(name="0", x=[10, 20, 30], y=[4.0, 2.0, 1.0], step=[1, 2, 3])
    >>> b = MetricSeries(name="1", x=[12, 22], y=[6.0, 3.0], step=[1, 2])
    >>> both = average_runs("arm", [a, b])
    >>> both.x, both.y, both.low, both.high
    ([11.0, 21.0], [5.0, 2.5], [4.0, 2.0], [6.0, 3.0])
    """
    found = [dict(zip(run.step, zip(run.x, run.y, strict=True), strict=True)) for run in runs]
    shared = sorted(set.intersection(*(set(run) for run in found)))
    x = [fmean(run[step][0] for run in found) for step in shared]
    values = [[run[step][1] for run in found] for step in shared]
    several = len(runs) > 1
    return MetricSeries(
        name=name,
        x=x,
        y=[fmean(row) for row in values],
        low=[min(row) for row in values] if several else (),
        high=[max(row) for row in values] if several else (),
        step=shared,
        marks=runs[0].marks,
    )
