"""Fill-in-the-middle (FIM) transformation of code documents, PSM and SPM."""

from random import Random

from paddock.config import BaseSettings
from paddock.text import SpecialToken

FimParts = tuple[str | SpecialToken, ...]  # alternating special tokens and text, or one text

PSM = (SpecialToken.CODE_PREFIX, SpecialToken.CODE_SUFFIX, SpecialToken.CODE_MIDDLE)
SPM = (SpecialToken.CODE_SUFFIX, SpecialToken.CODE_PREFIX, SpecialToken.CODE_MIDDLE)


class FimSettings(BaseSettings):
    rate: float = 0.5  # fraction of code documents
    spm_rate: float = 0.5  # fraction of those in SPM order (suffix, prefix, middle)


def fill_in_middle(text: str, settings: FimSettings, rng: Random) -> FimParts:
    """Split the text at two random places and move the middle to the end; or leave it unchanged.

    >>> "".join(fill_in_middle("abcdef", FimSettings(rate=1.0, spm_rate=0.0), Random(3)))
    '<|code_prefix|>ab<|code_suffix|>ef<|code_middle|>cd'
    """
    if rng.random() >= settings.rate:
        return (text,)
    order = SPM if rng.random() < settings.spm_rate else PSM
    start, stop = sorted(rng.randint(0, len(text)) for _ in range(2))
    pieces = {
        SpecialToken.CODE_PREFIX: text[:start],
        SpecialToken.CODE_MIDDLE: text[start:stop],
        SpecialToken.CODE_SUFFIX: text[stop:],
    }
    return tuple(part for token in order for part in (token, pieces[token]))


def undo_fill_in_middle(parts: FimParts) -> str:
    """The original text."""
    if len(parts) == 1:
        return str(parts[0])
    pieces = dict(zip(parts[::2], parts[1::2], strict=True))
    order = (SpecialToken.CODE_PREFIX, SpecialToken.CODE_MIDDLE, SpecialToken.CODE_SUFFIX)
    return "".join(pieces[token] for token in order)
