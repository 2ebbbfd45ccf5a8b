"""Fill in the middle: code rearranged so that the model learns to write what stands between."""

from random import Random

from paddock.config import BaseSettings
from paddock.text import SpecialToken

FimParts = tuple[str | SpecialToken, ...]  # text, and tokens between

PSM = (SpecialToken.CODE_PREFIX, SpecialToken.CODE_SUFFIX, SpecialToken.CODE_MIDDLE)
SPM = (SpecialToken.CODE_SUFFIX, SpecialToken.CODE_PREFIX, SpecialToken.CODE_MIDDLE)


class FimSettings(BaseSettings):
    rate: float = 0.5  # share of code documents
    spm_rate: float = 0.5  # share of those that show the suffix before the prefix


def fill_in_middle(text: str, rules: FimSettings, chance: Random) -> FimParts:
    """The text cut at two places and put together again with its middle last, or as it is.

    >>> "".join(fill_in_middle("abcdef", FimSettings(rate=1.0, suffix_first=0.0), Random(3)))
    '<|code_prefix|>ab<|code_suffix|>ef<|code_middle|>cd'
    """
    if chance.random() >= rules.rate:
        return (text,)
    order = SPM if chance.random() < rules.spm_rate else PSM
    start, stop = sorted(chance.randint(0, len(text)) for _ in range(2))
    pieces = {
        SpecialToken.CODE_PREFIX: text[:start],
        SpecialToken.CODE_MIDDLE: text[start:stop],
        SpecialToken.CODE_SUFFIX: text[stop:],
    }
    return tuple(part for token in order for part in (token, pieces[token]))


def undo_fill_in_middle(parts: FimParts) -> str:
    """The text that `fill_in_middle` rearranged."""
    if len(parts) == 1:
        return str(parts[0])
    pieces = dict(zip(parts[::2], parts[1::2], strict=True))
    order = (SpecialToken.CODE_PREFIX, SpecialToken.CODE_MIDDLE, SpecialToken.CODE_SUFFIX)
    return "".join(pieces[token] for token in order)
