"""Text made plain, and what is no text left out."""

import zlib
from typing import Annotated

from pydantic import Field

from paddock.config import BaseSettings
from paddock.data.sources import DropCounts

_CONTROLS = {c: None for c in [*range(32), *range(127, 160)] if chr(c) not in "\n\t"}
_SAMPLE_BYTES = 65536


class CleaningSettings(BaseSettings):
    min_chars: Annotated[int, Field(ge=1)] = 32
    max_unreadable_fraction: float = 0.02  # share of control and replacement characters
    # zlib makes prose and code a third to a quarter of their size, logs and tables a tenth.
    min_compression_ratio: float = 0.06


def clean_text(text: str, rules: CleaningSettings, drops: DropCounts) -> str | None:
    """The text with "\\n" line ends, without control characters; None, and counted, if it is empty,
    too short, broken, or says the same over and over."""
    try:
        text.encode()
    except UnicodeEncodeError:  # half a pair of surrogates, which JSON can say and UTF-8 cannot
        drops["encoding"] += 1
        return None
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    plain = lines.translate(_CONTROLS)
    unreadable = len(lines) - len(plain) + plain.count("\ufffd")
    reason = ""
    if not plain.strip():
        reason = "empty"
    elif unreadable > rules.max_unreadable_fraction * len(lines):
        reason = "binary"
    elif len(plain) < rules.min_chars:
        reason = "short"
    elif compression_ratio(plain) < rules.min_compression_ratio:
        reason = "repetitive"
    drops.update([reason] if reason else [])
    return None if reason else plain


def compression_ratio(text: str) -> float:
    """To what share of its size zlib brings the beginning of a text.

    >>> compression_ratio("so it goes " * 500) < 0.05 < compression_ratio("so it goes")
    True
    """
    sample = text.encode()[:_SAMPLE_BYTES]
    return len(zlib.compress(sample, 1)) / len(sample)
