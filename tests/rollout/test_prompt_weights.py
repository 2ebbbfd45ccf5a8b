"""Prompts are drawn in proportion to their weights, by number alone, and none is lost."""

from collections import Counter

import pytest

from paddock.rollout.prompt_weights import PromptWeights
from paddock.rollout.settings import PromptWeightSettings

SOLVED = {0: 0.0, 1: 0.125, 2: 0.5, 3: 0.875, 4: 1.0}  # prompt 5 was never tried


def weights_of(min_weight, key="0/sums"):
    settings = PromptWeightSettings(min_weight=min_weight)
    weights = PromptWeights(settings, num_prompts=6, key=key)
    for prompt, rate in SOLVED.items():
        weights.record(prompt, [1.0] * round(8 * rate) + [0.5] * round(8 * (1 - rate)))
    return weights


@pytest.mark.parametrize("min_weight", [0.05, 0.3, 1.0])
def test_prompts_are_drawn_in_proportion_to_their_weight(min_weight):
    weights = weights_of(min_weight)
    drawn = Counter(number % 6 for number in range(6 * 4000) if weights.is_drawn(number))
    for prompt in range(6):
        assert weights.weight(prompt) >= min_weight
        assert drawn[prompt] / 4000 == pytest.approx(weights.weight(prompt), abs=0.03)
    assert drawn[2] == drawn[5] == 4000
    assert weights.weight(0) == weights.weight(4) == pytest.approx(min_weight)
    assert weights.weight(1) == weights.weight(3)


def test_a_draw_depends_on_nothing_but_number_key_and_pass_rate():
    first, again, other = (weights_of(0.3, key) for key in ("a", "a", "b"))
    numbers = range(600)
    assert [first.is_drawn(n) for n in numbers] == [again.is_drawn(n) for n in reversed(numbers)][
        ::-1
    ]
    assert [first.is_drawn(n) for n in numbers] != [other.is_drawn(n) for n in numbers]


def test_a_prompt_that_becomes_solvable_is_drawn_more():
    weights = weights_of(0.1)
    before = weights.weight(0)
    weights.record(6, [1.0, 0.0, 0.0, 1.0])
    assert weights.pass_rate[0] == 0.375 and weights.weight(0) > 5 * before
    weights.record(12, [])  # nothing but failures of the environment
    assert weights.pass_rate[0] == 0.375
