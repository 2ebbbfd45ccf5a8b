import pytest

from paddock.records import Grammar, LogitBias, SamplingParams
from paddock.records.json_codec import decode, encode


def test_it_travels_unchanged():
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
        ("max_new_tokens", 0, "is less than 1"),
        ("min_new_tokens", -1, "is negative"),
        ("temperature", -0.1, "is not at least 0"),
        ("temperature", float("nan"), "is not at least 0"),
        ("top_p", 1.5, r"is not in \(0, 1\]"),
        ("top_k", 0, "is less than 1"),
        ("min_p", 2.0, r"is not in \[0, 1\]"),
        ("repetition_penalty", 0.0, "is not above 0"),
        ("frequency_penalty", 3.0, r"is not in \[-2, 2\]"),
        ("presence_penalty", float("inf"), r"is not in \[-2, 2\]"),
        ("stop_ids", (3, -1), "has a negative id"),
        ("stop_texts", ("",), "has an empty text"),
        ("seed", -1, "is not in"),
        ("seed", 2**63, "is not in"),
        ("thinking_budget", -1, "is negative"),
    ],
)
def test_what_no_sampler_could_do_is_refused(field, value, why):
    with pytest.raises(ValueError, match=f"{field}: .*{why}"):
        SamplingParams(**{field: value})


def test_less_cannot_exceed_more():
    with pytest.raises(ValueError, match="min_new_tokens: 5 exceeds max_new_tokens"):
        SamplingParams(min_new_tokens=5, max_new_tokens=4)


def test_next_to_no_temperature_is_none():
    assert SamplingParams(temperature=1e-9).is_greedy
    assert SamplingParams(temperature=1e-9).logprob_temperature == 1.0
    assert not SamplingParams(temperature=0.01).is_greedy


def test_a_grammar_and_a_bias_are_checked():
    with pytest.raises(ValueError, match="kind: 'lark' is none of json_schema"):
        Grammar("lark", "x")
    with pytest.raises(ValueError, match="amount: inf is not finite"):
        LogitBias(1, float("inf"))
