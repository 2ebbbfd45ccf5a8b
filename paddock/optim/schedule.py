"""How a number moves over a run: records whose `at(x)` is the value at step or token x.

The unit of x is the caller's, as long as it is one. `Constant`, `Linear` and `Cosine` give a
factor in [0, 1] to multiply a peak by; `Rise` and `Stairs` give the number itself. What has
reached its end stays there.
"""

from bisect import bisect_right
from dataclasses import dataclass
from math import cos, isclose, pi
from typing import Protocol


class Schedule(Protocol):
    def at(self, x: float) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantSchedule:
    """0 to 1 over `warmup`, then 1."""

    warmup: float = 0.0

    def at(self, x: float) -> float:
        return _share(x, 0.0, self.warmup)


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
        fallen = _share(x, self.warmup + self.flat, self.end)
        return _share(x, 0.0, self.warmup) * (1 - (1 - self.final) * fallen)


@dataclass(frozen=True, slots=True, kw_only=True)
class CosineSchedule:
    """0 to 1 over `warmup`, then half a cosine wave down to `final` at `end`."""

    end: float
    final: float = 0.0
    warmup: float = 0.0

    def __post_init__(self) -> None:
        _check_order(self.warmup, self.end)

    def at(self, x: float) -> float:
        fallen = (1 - cos(pi * _share(x, self.warmup, self.end))) / 2
        return _share(x, 0.0, self.warmup) * (1 - (1 - self.final) * fallen)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRampSchedule:
    """From `first` at 0 in a straight line to `last` at `end`: batch-size warm-up.

    >>> round(LinearRampSchedule(first=16e6, last=64e6, end=500e9).at(250e9))
    40000000
    """

    first: float
    last: float
    end: float

    def at(self, x: float) -> float:
        return self.first + (self.last - self.first) * _share(x, 0.0, self.end)


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
            raise ValueError(f"stairs need ascending edges and one value more than edges: {self}")

    def at(self, x: float) -> float:
        return self.values[bisect_right(self.edges, x)]


def _share(x: float, start: float, end: float) -> float:
    """How much of the way from start to end lies behind x; one of no length does once x is there.

    >>> [_share(x, 5, 5) for x in (4, 5)]
    [0.0, 1.0]
    """
    return min(max((x - start) / (end - start), 0.0), 1.0) if start < end else float(x >= end)


def _check_order(start: float, end: float) -> None:
    if start > end and not isclose(start, end):  # shares of a run that add up to it, rounded
        raise ValueError(f"the descent would begin at {start}, after its end at {end}")
