"""Formatting and parsing of counts and sizes with units."""

import re

from paddock.launch.errors import UserError

POWERS = {"T": 4, "G": 3, "M": 2, "K": 1}  # of 1000 or 1024


def format_count(value: int) -> str:
    """
    >>> format_count(743_907_000_000), format_count(951_582_720), format_count(67_584)
    ('743.91 B', '951.58 M', '67,584')
    """
    return _scaled(value, {"B": 1000**3, "M": 1000**2}) or f"{value:,}"


def format_bytes(value: int) -> str:
    """
    >>> format_bytes(14_394_851_328), format_bytes(512)
    ('13.41 GiB', '512 B')
    """
    return _scaled(value, {f"{unit}iB": 1024**n for unit, n in POWERS.items()}) or f"{value} B"


def _scaled(value: int, units: dict[str, int]) -> str | None:
    """The value in the largest unit that does not exceed it."""
    return next(
        (f"{value / unit:,.2f} {name}" for name, unit in units.items() if value >= unit), None
    )


def unit_for(value: int) -> tuple[str, int]:
    """
    >>> unit_for(81_660_000_000), unit_for(820_990)
    (('G', 1000000000), ('K', 1000))
    """
    return next(((name, 1000**n) for name, n in POWERS.items() if value >= 1000**n), ("", 1))


def parse_size(text: str) -> int:
    """Bytes from a size with a decimal or binary unit, or none.

    >>> parse_size("5GB"), parse_size("1.5 MiB"), parse_size("4096")
    (5000000000, 1572864, 4096)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", text.strip())
    value = 0 if match is None else float(match[1])
    if match is None or not value:
        raise UserError(f"{text!r} is not a size such as 5GB or 500MiB")
    return int(value * (1024 if match[3] else 1000) ** POWERS.get(match[2], 0))
