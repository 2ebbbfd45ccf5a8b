from random import Random

import pytest

from paddock.data.prepare.dedup import DedupSettings, MinHashDeduplicator, _ngrams

WORDS = [f"{a}{b}" for a in ("lo", "ka", "mi", "ne", "tu") for b in ("ra", "so", "vi", "pe", "da")]


def prose(seed, words=300):
    rng = Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words))


def changed(text, share, seed=1):
    rng = Random(seed)
    return " ".join("xx" if rng.random() < share else word for word in text.split())


def test_an_exact_copy_is_found_despite_surrounding_whitespace():
    copies = MinHashDeduplicator(DedupSettings(minhash=False))
    assert copies.duplicate_reason("one two") is None
    assert copies.duplicate_reason("one two\n") == "exact copy"
    assert copies.duplicate_reason("one two three") is None


def test_near_copies_are_found_and_distinct_texts_are_kept():
    copies = MinHashDeduplicator(DedupSettings())
    originals = [prose(seed) for seed in range(100)]
    assert [copies.duplicate_reason(text) for text in originals] == [None] * 100
    assert [copies.duplicate_reason(changed(text, 0.01)) for text in originals].count(
        "near copy"
    ) >= 95
    assert [copies.duplicate_reason(changed(text, 0.05)) for text in originals].count(None) >= 95
    assert [copies.duplicate_reason(changed(text, 0.3)) for text in originals].count(None) >= 99


@pytest.mark.parametrize("share", [0.0, 0.02, 0.05, 0.2])
def test_signatures_estimate_the_jaccard_similarity(share):
    copies = MinHashDeduplicator(DedupSettings(bands=64, rows_per_band=16))
    here, there = prose(0, 2000), changed(prose(0, 2000), share)
    a, b = set(_ngrams(here, 5).tolist()), set(_ngrams(there, 5).tolist())
    estimate = (copies.signature(here) == copies.signature(there)).mean()
    assert abs(estimate - len(a & b) / len(a | b)) < 0.06  # four deviations of 1024 hashes


@pytest.mark.parametrize("text", ["one", "one two", "+", "\u6f22\u5b57"])
def test_short_texts_have_signatures_too(text):
    copies = MinHashDeduplicator(DedupSettings(exact=False))
    assert copies.duplicate_reason(text) is None
    assert copies.duplicate_reason(text) == "near copy"


@pytest.mark.parametrize("name", ["similarity", "shingle_words", "bands", "rows"])
def test_settings_that_match_everything_or_nothing_are_rejected(name):
    with pytest.raises(ValueError, match=name):
        DedupSettings(**{name: 0})
