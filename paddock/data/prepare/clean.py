"""Text cleaning: line ends, control characters, and filters for unusable documents."""

import zlib
from typing import Annotated

from pydantic import Field

from paddock.config import BaseSettings
from paddock.data.sources import DropCounts

_CONTROLS = {c: None for c in [*range(32), *range(127, 160)] if chr(c) not in "\n\t"}
_SAMPLE_BYTES = 65536


class CleaningSettings(BaseSettings):
    min_chars: Annotated[int, Field(ge=1)] = 32
    max_unreadable_fraction: float = 0.02  # of control and replacement characters
    # zlib compresses prose and code to a third or a quarter, logs and tables to a tenth.
    min_compression_ratio: float = 0.06


def clean_text(text: str, settings: CleaningSettings, drops: DropCounts) -> str | None:
    """The text with "\\n" line ends and without control characters; None, with the reason counted,
    if it is empty, too short, binary or repetitive."""
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, valid in JSON but not in UTF-8
        drops["invalid encoding"] += 1
        return None
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    plain = lines.translate(_CONTROLS)
    unreadable = len(lines) - len(plain) + plain.count("\ufffd")
    reason = ""
    if not plain.strip():
        reason = "empty"
    elif unreadable > settings.max_unreadable_fraction * len(lines):
        reason = "binary"
    elif len(plain) < settings.min_chars:
        reason = "too short"
    elif compression_ratio(plain) < settings.min_compression_ratio:
        reason = "repetitive"
    drops.update([reason] if reason else [])
    return None if reason else plain


def compression_ratio(text: str) -> float:
    """Compressed size over size of the beginning of a text.

    >>> compression_ratio("so it goes " * 500) < 0.05 < compression_ratio("so it goes")
    True
    """
    sample = text.encode()[:_SAMPLE_BYTES]
    return len(zlib.compress(sample, 1)) / len(sample)
