"""Numbers as people read and write them."""

import re

THOUSANDS = {"T": 4, "G": 3, "M": 2, "K": 1}  # unit prefixes, as powers of 1000 or 1024


def count(value: int) -> str:
    """
    >>> count(743_907_000_000), count(951_582_720), count(67_584)
    ('743.91 B', '951.58 M', '67,584')
    """
    return _scaled(value, {"B": 1000**3, "M": 1000**2}) or f"{value:,}"


def operations(value: int) -> str:
    """
    >>> operations(81_660_000_000), operations(22_300)
    ('81.66 G', '22.30 K')
    """
    return _scaled(value, {unit: 1000**n for unit, n in THOUSANDS.items()}) or str(value)


def size(value: int) -> str:
    """
    >>> size(14_394_851_328), size(512)
    ('13.41 GiB', '512 B')
    """
    return _scaled(value, {f"{unit}iB": 1024**n for unit, n in THOUSANDS.items()}) or f"{value} B"


def _scaled(value: int, units: dict[str, int]) -> str | None:
    """The value in the first unit that is not too large for it."""
    fitting = (f"{value / unit:,.2f} {name}" for name, unit in units.items() if value >= unit)
    return next(fitting, None)


def parse_size(text: str) -> int:
    """Bytes from a size with a decimal or binary unit, or none.

    >>> parse_size("5GB"), parse_size("1.5 MiB"), parse_size("4096")
    (5000000000, 1572864, 4096)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", text.strip())
    value = 0 if match is None else float(match[1])
    if match is None or not value:
        raise ValueError(f"{text!r} is not a size such as 5GB or 500MiB")
    return int(value * (1024 if match[3] else 1000) ** THOUSANDS.get(match[2], 0))
