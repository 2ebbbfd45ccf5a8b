from collections import Counter

import pytest
from pydantic import ValidationError

from paddock.data.mixture import Mixture, MixtureSettings
from paddock.data.sources import DataError
from tests.data.tiny import make_datasets

FACTS_FIRST = {
    "facts": ((0.0, 0.75), (0.3, 0.75), (0.3, 0.15), (1.0, 0.15)),
    "chains": ((0.3, 0.0), (0.3, 0.85)),
    "late": ((0.5, 0.0), (1.0, 1.0)),
}


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    lengths = {"facts": [20] * 50, "chains": [60] * 40, "late": [10, 30] * 10}
    return make_datasets(tmp_path_factory.mktemp("datasets"), lengths)


def drawn(mixture, count, progress=0.0):
    return [mixture.next_document(progress) for _ in range(count)]


def shares(pieces, size):
    counts = Counter()
    for piece in pieces:
        counts[piece.source] += size(piece)
    return {source: count / sum(counts.values()) for source, count in counts.items()}


@pytest.mark.parametrize(("unit", "size"), [("tokens", len), ("documents", lambda _: 1)])
def test_weights_are_fractions_of_their_unit(documents, unit, size):
    weights = {"facts": 6.0, "chains": 3.0, "late": 1.0}
    mixture = Mixture(documents, MixtureSettings(weights=weights, unit=unit), seed=0)
    found = shares(drawn(mixture, 6000), size)
    assert found == pytest.approx({"facts": 0.6, "chains": 0.3, "late": 0.1}, abs=0.03)


def test_without_weights_every_source_is_repeated_equally(documents):
    mixture = Mixture(documents, MixtureSettings(), seed=0)
    drawn(mixture, 11_000)
    assert mixture.epochs() == pytest.approx(dict.fromkeys(documents, 100), rel=0.1)


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        (0.0, {"facts": 1.0}),
        (0.2999, {"facts": 1.0}),
        (0.3, {"facts": 0.15, "chains": 0.85}),
        (0.75, {"facts": 0.1, "chains": 0.85 / 1.5, "late": 0.5 / 1.5}),
    ],
)
def test_weights_follow_the_progress_of_the_run(documents, progress, expected):
    settings = MixtureSettings(weights=FACTS_FIRST, unit="documents")
    pieces = drawn(Mixture(documents, settings, seed=0), 3000, progress)
    assert shares(pieces, lambda _: 1) == pytest.approx(expected, abs=0.03)


def test_an_epoch_has_every_document_once_and_the_next_has_another_order(documents):
    mixture = Mixture(documents, MixtureSettings(weights={"facts": 1.0}), seed=0)
    first, second = ([p.document for p in drawn(mixture, 50)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second != list(range(50))


def test_the_order_follows_from_the_seed(documents):
    same, again, other = (
        drawn(Mixture(documents, MixtureSettings(), seed=seed), 50) for seed in (1, 1, 2)
    )
    assert same == again != other


def test_invalid_mixtures_are_rejected(documents, tmp_path):
    with pytest.raises(
        DataError, match="source 'code' not found; the corpus has facts, chains, late"
    ):
        Mixture(documents, MixtureSettings(weights={"code": 1.0}), seed=0)
    with pytest.raises(DataError, match=r"all weights of the mixture are zero at progress 0\.1"):
        Mixture(documents, MixtureSettings(weights={"late": ((0.5, 0.0),)}), seed=0).next_document(
            0.1
        )
    with pytest.raises(DataError, match="no source of the mixture has any documents"):
        Mixture(make_datasets(tmp_path, {"none": []}), MixtureSettings(), seed=0)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), (), ((0.5, 1.0), (0.1, 1.0))])
def test_invalid_weights_are_rejected(weight):
    with pytest.raises(ValidationError, match="'a' must be"):
        MixtureSettings(weights={"a": weight})
