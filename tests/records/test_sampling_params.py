import pytest

from paddock.records import Grammar, LogitBias, SamplingParams
from paddock.records.json_codec import decode, encode


def test_sampling_params_round_trip_through_json():
    whole = SamplingParams(
        max_new_tokens=9,
        temperature=0.5,
        top_k=3,
        logit_bias=(LogitBias(4, -1.5),),
        stop_token_ids=(1, 2),
        stop=("\n\n",),
        seed=7,
        thinking_budget=0,
        grammar=Grammar("regex", "a+"),
    )
    assert decode(SamplingParams, encode(whole)) == whole
    assert decode(SamplingParams, {}) == SamplingParams()


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("max_new_tokens", 0, "must be at least 1"),
        ("min_new_tokens", -1, "must not be negative"),
        ("temperature", -0.1, "must be at least 0"),
        ("temperature", float("nan"), "must be at least 0"),
        ("top_p", 1.5, r"must be in \(0, 1\]"),
        ("top_k", 0, "must be at least 1"),
        ("min_p", 2.0, r"must be in \[0, 1\]"),
        ("repetition_penalty", 0.0, "must be above 0"),
        ("frequency_penalty", 3.0, r"must be in \[-2, 2\]"),
        ("presence_penalty", float("inf"), r"must be in \[-2, 2\]"),
        ("stop_token_ids", (3, -1), "must not hold a negative id"),
        ("stop", ("",), "must not hold an empty string"),
        ("seed", -1, "must be in"),
        ("seed", 2**63, "must be in"),
        ("thinking_budget", -1, "must not be negative"),
    ],
)
def test_an_invalid_value_is_rejected(field, value, why):
    with pytest.raises(ValueError, match=f"{field}: .*{why}"):
        SamplingParams(**{field: value})


def test_min_new_tokens_cannot_exceed_max_new_tokens():
    with pytest.raises(ValueError, match="min_new_tokens: 5 exceeds max_new_tokens"):
        SamplingParams(min_new_tokens=5, max_new_tokens=4)


def test_a_tiny_temperature_is_greedy():
    assert SamplingParams(temperature=1e-9).is_greedy
    assert SamplingParams(temperature=1e-9).logprob_temperature == 1.0
    assert not SamplingParams(temperature=0.01).is_greedy


def test_a_grammar_and_a_bias_are_checked():
    with pytest.raises(ValueError, match="kind: must be one of json_schema"):
        Grammar("lark", "x")
    with pytest.raises(ValueError, match="amount: must be finite, got inf"):
        LogitBias(1, float("inf"))
