"""Axes: where a value stands, which values are marked, and how numbers are written."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10

UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


@dataclass(frozen=True, slots=True)
class AxisScale:
    """From `low` to `high`, which stand at 0 and 1. A logarithmic one is above zero throughout."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        """
        >>> AxisScale(0, 4).at(1), AxisScale(1, 100, log=True).at(10)
        (0.25, 0.5)
        """
        if self.log:
            return (log10(value) - log10(self.low)) / (log10(self.high) - log10(self.low))
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = 8) -> list[float]:
        """At most `most` round values within the scale, equally far apart, or the ones, twos and
        fives of every decade of a logarithmic scale.

        >>> AxisScale(0.3, 2.6).ticks(6), AxisScale(0.4, 60, log=True).ticks()
        ([0.5, 1.0, 1.5, 2.0, 2.5], [0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0])
        """
        if not self.log:
            return _even(self.low, self.high, most)
        decades = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        for digits in ((1, 2, 5), (1, 3), (1,)):
            marks = [float(f"{digit}e{decade}") for decade in decades for digit in digits]
            found = [mark for mark in marks if self.low <= mark <= self.high]
            if len(found) <= most:
                break
        if len(found) > most:  # many decades: every second, third, ...
            found = found[:: ceil(len(found) / most)]
        return found if len(found) > 2 else _even(self.low, self.high, most)


def _even(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / most
    power = 10.0 ** floor(log10(rough))
    for size in (1, 2, 5, 10, 20):
        step = size * power
        first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
        if last - first < most:
            break
    # Rounded to the step, or three tenths would read 0.30000000000000004.
    digits = max(0, 1 - floor(log10(step)))
    return [round(number * step, digits) for number in range(first, last + 1)]


def fit_scale(
    values: Iterable[float], *, log: bool = False, zero: bool = False, pad: float = 0.0
) -> AxisScale:
    """A scale that holds every finite value (every positive one, if logarithmic), with `pad` of its
    length free on both sides; never below zero where no value is. One value stands in the middle.

    >>> fit_scale([2.0, 4.0, float("nan")], pad=0.1)
    Scale(low=1.8, high=4.2, log=False)
    >>> fit_scale([0.0, 10.0], pad=0.1), fit_scale([3.0])
    (Scale(low=0.0, high=11.0, log=False), Scale(low=1.5, high=4.5, log=False))
    """
    found = [value for value in values if isfinite(value) and (value > 0 or not log)]
    low, high = min(found, default=1.0), max(found, default=1.0)
    if zero and not log:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
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
    """Ticks of one axis, alike in unit and decimals.

    >>> tick_labels([0.0, 0.5, 1.0]), tick_labels([0.0, 5e5, 1e6, 1.5e6]), tick_labels([0.0, 1e-4, 2e-4])
    (['0', '0.5', '1'], ['0', '0.5M', '1M', '1.5M'], ['0', '1e-4', '2e-4'])
    """
    largest = max((abs(tick) for tick in ticks), default=0)
    if 0 < largest < 1e-3:
        return [_power(tick) for tick in ticks]
    size, unit = _unit(largest)
    return [f"{tick / size:,.10g}{unit}" if tick else "0" for tick in ticks]


def _unit(value: float) -> tuple[float, str]:
    """What to divide by, and its name. Four digits stay as they are: 1,250 steps, not 1.25K."""
    return next((pair for pair in UNITS if value >= max(pair[0], 1e4)), (1.0, ""))


def _power(value: float) -> str:
    if value == 0:
        return "0"
    digits, _, power = f"{value:.6e}".partition("e")
    return f"{float(digits):g}e{int(power)}"


def format_number(value: float, digits: int = 4) -> str:
    """A number in running text.

    >>> format_number(0.62767), format_number(1_277_184), format_number(512), format_number(15_000), format_number(3e-05), format_number(2.0)
    ('0.6277', '1.277M', '512', '15K', '3e-5', '2')
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
    >>> format_duration(4.2), format_duration(441), format_duration(12_000), format_duration(200_000)
    ('4.2 s', '7 min 21 s', '3 h 20 min', '2 d 7 h')
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
