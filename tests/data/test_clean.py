from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.data.prepare.clean import CleaningSettings, clean_text

LONG = "All that is gold does not glitter, not all those who wander are lost. "


def dropped(text, **rules):
    drops = Counter()
    assert clean_text(text, CleaningSettings(**rules), drops) is None
    return dict(drops)


def test_line_ends_are_newlines_and_control_characters_are_gone():
    drops = Counter()
    text = clean_text(
        "one\r\ntwo\rthree\x07\n\tfour" + LONG, CleaningSettings(max_unreadable_fraction=0.1), drops
    )
    assert text == "one\ntwo\nthree\n\tfour" + LONG
    assert not drops


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (" \n\t ", "empty"),
        ("short", "too short"),
        ("\x01\x02\x03" * 20 + LONG, "binary"),
        ("\ufffd" * 20 + LONG, "binary"),
        ("buy now " * 300, "repetitive"),
        ("half a pair \ud800 " + LONG, "invalid encoding"),
    ],
)
def test_dropped_documents_are_counted_by_reason(text, reason):
    assert dropped(text) == {reason: 1}


@given(st.text())
def test_cleaning_is_idempotent(text):
    rules = CleaningSettings(min_chars=1, min_compression_ratio=0.0, max_unreadable_fraction=1.0)
    once = clean_text(text, rules, Counter())
    if once is not None:
        assert clean_text(once, rules, Counter()) == once
