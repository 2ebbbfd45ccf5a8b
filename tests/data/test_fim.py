from random import Random

from hypothesis import given
from hypothesis import strategies as st

from paddock.data.prepare.fim import PSM, SPM, FimSettings, fill_in_middle, undo_fill_in_middle
from paddock.text import SpecialToken


@given(st.text(), st.integers(0, 1000), st.floats(0, 1))
def test_the_text_can_be_reassembled(text, seed, suffix_first):
    parts = fill_in_middle(text, FimSettings(rate=1.0, spm_rate=suffix_first), Random(seed))
    assert tuple(part for part in parts if isinstance(part, SpecialToken)) in (PSM, SPM)
    assert undo_fill_in_middle(parts) == text


def test_rates_are_kept():
    rng = Random(0)
    rows = [fill_in_middle("abc", FimSettings(rate=0.6, spm_rate=0.25), rng) for _ in range(4000)]
    cut = [row for row in rows if len(row) > 1]
    assert abs(len(cut) / len(rows) - 0.6) < 0.04
    assert abs(sum(row[0] == SpecialToken.CODE_SUFFIX for row in cut) / len(cut) - 0.25) < 0.05


def test_with_rate_zero_the_text_is_unchanged():
    assert fill_in_middle("abc", FimSettings(rate=0.0), Random(0)) == ("abc",)
