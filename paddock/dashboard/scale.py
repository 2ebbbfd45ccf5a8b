"""Axis scales, ticks, and formats of numbers, durations and sizes."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10

UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


@dataclass(frozen=True, slots=True)
class AxisScale:
    """Maps `low` to 0 and `high` to 1. Both are positive on a logarithmic scale."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        """Position of a value.

        >>> AxisScale(0, 4).at(1), AxisScale(1, 100, log=True).at(10)
        (0.25, 0.5)
        """
        if self.log:
            return (log10(value) - log10(self.low)) / (log10(self.high) - log10(self.low))
        return (value - self.low) / (self.high - self.low)

    def ticks(self, max_ticks: int = 8) -> list[float]:
        """At most `max_ticks` round values: evenly spaced, or 1, 2 and 5 of each decade if log.

        >>> AxisScale(0.3, 2.6).ticks(6), AxisScale(0.4, 60, log=True).ticks()
        ([0.5, 1.0, 1.5, 2.0, 2.5], [0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0])
        """
        if not self.log:
            return _even(self.low, self.high, max_ticks)
        decades = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        for digits in ((1, 2, 5), (1, 3), (1,)):
            marks = [float(f"{digit}e{decade}") for decade in decades for digit in digits]
            found = [mark for mark in marks if self.low <= mark <= self.high]
            if len(found) <= max_ticks:
                break
        if len(found) > max_ticks:  # many decades: every second, third, ...
            found = found[:: ceil(len(found) / max_ticks)]
        return found if len(found) > 2 else _even(self.low, self.high, max_ticks)


def _even(low: float, high: float, max_ticks: int) -> list[float]:
    rough = (high - low) / max_ticks
    power = 10.0 ** floor(log10(rough))
    for size in (1, 2, 5, 10, 20):
        step = size * power
        first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
        if last - first < max_ticks:
            break
    # Rounded to the step: 3 * 0.1 is 0.30000000000000004.
    digits = max(0, 1 - floor(log10(step)))
    return [round(number * step, digits) for number in range(first, last + 1)]


def fit_scale(
    values: Iterable[float], *, log: bool = False, zero: bool = False, pad: float = 0.0
) -> AxisScale:
    """A scale that contains all finite values (all positive ones, if `log`).

    `pad` of its length is free on both sides, but it does not cross zero unless a value does. A
    single value is in the middle.

    >>> fit_scale([2.0, 4.0, float("nan")], pad=0.1)
    AxisScale(low=1.8, high=4.2, log=False)
    >>> fit_scale([0.0, 10.0], pad=0.1), fit_scale([3.0])
    (AxisScale(low=0.0, high=11.0, log=False), AxisScale(low=1.5, high=4.5, log=False))
    """
    found = [value for value in values if isfinite(value) and (value > 0 or not log)]
    low, high = min(found, default=1.0), max(found, default=1.0)
    if zero and not log:
        low, high = min(low, 0.0), max(high, 0.0)
    if zero and not log and low == high:  # only zeros
        high = 1.0
    elif low == high:
        half = (abs(low) or 1) / 2
        low, high = (low / 2, high * 2) if log else (low - half, low + half)
    elif log:
        free = (high / low) ** pad
        low, high = low / free, high * free
    else:
        above, below, free = low >= 0, high <= 0, pad * (high - low)
        low, high = low - (0 if zero and low == 0 else free), high + free
        low, high = max(low, 0.0) if above else low, min(high, 0.0) if below else high
    return AxisScale(low, high, log)


def tick_labels(ticks: list[float]) -> list[str]:
    """Labels of the ticks of one axis, with a common unit.

    >>> tick_labels([0.0, 0.5, 1.0]), tick_labels([0.0, 5e5, 1e6, 1.5e6])
    (['0', '0.5', '1'], ['0', '0.5M', '1M', '1.5M'])
    >>> tick_labels([0.0, 1e-4, 2e-4])
    ['0', '1e-4', '2e-4']
    """
    largest = max((abs(tick) for tick in ticks), default=0)
    if 0 < largest < 1e-3:
        return [_power(tick) for tick in ticks]
    size, unit = _unit(largest)
    return [f"{tick / size:,.10g}{unit}" if tick else "0" for tick in ticks]


def _unit(value: float) -> tuple[float, str]:
    """Divisor and suffix. Numbers of four digits have no suffix: 1,250 steps, not 1.25K."""
    return next((pair for pair in UNITS if value >= max(pair[0], 1e4)), (1.0, ""))


def _power(value: float) -> str:
    if value == 0:
        return "0"
    digits, _, power = f"{value:.6e}".partition("e")
    return f"{float(digits):g}e{int(power)}"


def format_number(value: float, digits: int = 4) -> str:
    """A number with `digits` significant digits and a suffix.

    >>> [format_number(value) for value in (0.62767, 1_277_184, 512, 15_000, 3e-05, 2.0)]
    ['0.6277', '1.277M', '512', '15K', '3e-5', '2']
    >>> format_number(float("nan"))
    'NaN'
    """
    if not isfinite(value):
        return "NaN" if value != value else f"{'-' * (value < 0)}infinite"
    if 0 < abs(value) < 1e-3:
        return _power(float(f"{value:.{digits - 2}e}"))
    size, unit = _unit(abs(value))
    return f"{float(f'{value / size:.{digits}g}'):,.10g}{unit}"


def format_duration(seconds: float) -> str:
    """
    >>> [format_duration(seconds) for seconds in (4.2, 441, 12_000, 200_000)]
    ['4.2 s', '7 min 21 s', '3 h 20 min', '2 d 7 h']
    """
    whole = int(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if minutes < 1:
        return f"{seconds:.3g} s"
    if hours < 1:
        return f"{minutes} min {whole % 60:02d} s"
    if days < 2:
        return f"{hours} h {minutes % 60:02d} min"
    return f"{days} d {hours % 24} h"


def format_bytes(value: float) -> str:
    """
    >>> format_bytes(512), format_bytes(1_500_000), format_bytes(14_394_851_328)
    ('512 B', '1.43 MiB', '13.4 GiB')
    """
    for unit, power in (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if value >= 1024**power:
            return f"{value / 1024**power:.3g} {unit}"
    return f"{value:.0f} B"
