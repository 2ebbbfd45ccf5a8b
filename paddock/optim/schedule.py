"""Schedules: `at(x)` is the value at step or token x.

The caller chooses the unit of x. `ConstantSchedule`, `LinearSchedule` and `CosineSchedule` return
a factor in [0, 1] for a peak value; `LinearRampSchedule` and `PiecewiseConstantSchedule` return the
value itself. After its end a schedule stays at its final value.
"""

from bisect import bisect_right
from dataclasses import dataclass
from math import cos, isclose, pi
from typing import Protocol


class Schedule(Protocol):
    """A value that depends on the step or the number of tokens."""

    def at(self, x: float) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantSchedule:
    """0 to 1 over `warmup`, then 1."""

    warmup: float = 0.0

    def at(self, x: float) -> float:
        return _progress(x, 0.0, self.warmup)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSchedule:
    """0 to 1 over `warmup`, 1 for `flat` more, then straight down to `final` at `end`.

    >>> LinearSchedule(end=100, final=0.25).at(50)
    0.625
    """

    end: float
    final: float = 0.0
    warmup: float = 0.0
    flat: float = 0.0

    def __post_init__(self) -> None:
        _check_order(self.warmup + self.flat, self.end)

    def at(self, x: float) -> float:
        decayed = _progress(x, self.warmup + self.flat, self.end)
        return _progress(x, 0.0, self.warmup) * (1 - (1 - self.final) * decayed)


@dataclass(frozen=True, slots=True, kw_only=True)
class CosineSchedule:
    """0 to 1 over `warmup`, then half a cosine wave down to `final` at `end`."""

    end: float
    final: float = 0.0
    warmup: float = 0.0

    def __post_init__(self) -> None:
        _check_order(self.warmup, self.end)

    def at(self, x: float) -> float:
        decayed = (1 - cos(pi * _progress(x, self.warmup, self.end))) / 2
        return _progress(x, 0.0, self.warmup) * (1 - (1 - self.final) * decayed)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRampSchedule:
    """Linear from `first` at 0 to `last` at `end`, for example batch-size warm-up.

    >>> round(LinearRampSchedule(first=16e6, last=64e6, end=500e9).at(250e9))
    40000000
    """

    first: float
    last: float
    end: float

    def at(self, x: float) -> float:
        return self.first + (self.last - self.first) * _progress(x, 0.0, self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecewiseConstantSchedule:
    """`values[0]` before `edges[0]`, then `values[1]` before `edges[1]`, ..., at last `values[-1]`.

    >>> router_bias_rate = PiecewiseConstantSchedule(values=(0.001, 0.0), edges=(15e12,))
    >>> router_bias_rate.at(15e12)
    0.0
    """

    values: tuple[float, ...]
    edges: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.values) != len(self.edges) + 1 or list(self.edges) != sorted(self.edges):
            raise ValueError(f"edges must ascend and values must be one more than edges: {self}")

    def at(self, x: float) -> float:
        return self.values[bisect_right(self.edges, x)]


def _progress(x: float, start: float, end: float) -> float:
    """Fraction of the way from start to end, clamped to [0, 1]; 1 from `end` on if it is empty.

    >>> [_progress(x, 5, 5) for x in (4, 5)]
    [0.0, 1.0]
    """
    return min(max((x - start) / (end - start), 0.0), 1.0) if start < end else float(x >= end)


def _check_order(start: float, end: float) -> None:
    if start > end and not isclose(start, end):  # ratios that add up to 1, up to rounding
        raise ValueError(f"warmup and flat end at {start}, after the schedule ends at {end}")
