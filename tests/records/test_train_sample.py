from dataclasses import FrozenInstanceError, replace
from math import inf, nan

import pytest

from paddock.records import TrainSample

SAMPLE = TrainSample(
    id="s/0",
    token_ids=(7, 8, 9),
    logprobs=(0.0, -0.1, -0.4),
    loss_mask=(False, True, True),
    advantages=(0.0, 0.5, 0.5),
    oldest_version=3,
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", ""),
        ("token_ids", (7, 8, -9)),
        ("logprobs", (0.0, -0.1)),
        ("logprobs", (0.0, -0.1, -inf)),
        ("loss_mask", (False, True)),
        ("loss_mask", (False, False, False)),
        ("loss_mask", (True, True, True)),
        ("advantages", (0.5,)),
        ("advantages", (0.0, nan, 0.5)),
        ("oldest_version", -1),
    ],
)
def test_an_invalid_sample_is_rejected_by_the_name_of_its_field(field, value):
    with pytest.raises(ValueError, match=f"^{field}: "):
        replace(SAMPLE, **{field: value})


def test_a_sample_is_immutable():
    with pytest.raises(FrozenInstanceError):
        SAMPLE.oldest_version = 9


def test_staleness_counts_versions_since_the_oldest_token():
    assert [SAMPLE.staleness(now) for now in (3, 4, 7)] == [0, 1, 4]
