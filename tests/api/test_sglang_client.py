"""Client side of SGLang's /generate: request bodies round-trip, responses are exact or rejected."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.api.body import parse_body
from paddock.api.errors import ApiError
from paddock.api.sglang_client import (
    parse_generate_output,
    parse_prompt_logprobs,
    to_sglang_sampling_params,
)
from paddock.api.sglang_request import SGLangSamplingBody, parse_sglang_sampling_params
from paddock.records import Grammar, LogitBias, SamplingParams, Segment

SAMPLINGS = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(5, 100),
    min_new_tokens=st.integers(0, 5),
    temperature=st.floats(0, 2),
    top_p=st.floats(0.1, 1),
    top_k=st.none() | st.integers(1, 50),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.5, 2),
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-9, 9), max_size=2).map(
        lambda found: tuple(LogitBias(token, amount) for token, amount in found.items())
    ),
    stop_token_ids=st.lists(st.integers(0, 99), max_size=2).map(tuple),
    stop=st.lists(st.text(min_size=1, max_size=3), max_size=2).map(tuple),
    ignore_eos=st.booleans(),
    seed=st.none() | st.integers(0, 2**63 - 1),
    grammar=st.none() | st.just(Grammar("regex", "a+")),
)


@given(SAMPLINGS)
def test_sampling_params_round_trip(sampling):
    body = parse_body(SGLangSamplingBody, to_sglang_sampling_params(sampling))
    assert parse_sglang_sampling_params(body, body.max_new_tokens, None) == sampling


def test_max_new_tokens_is_required():
    with pytest.raises(ApiError, match="max_new_tokens"):
        to_sglang_sampling_params(SamplingParams())


def payload(ids, *, finish=None, total=None, **meta):
    reason = None if finish is None else {"type": finish, "matched": 9}
    entries = [[-0.5, i, None] for i in ids]
    return {
        "output_ids": list(ids),
        "meta_info": {
            "finish_reason": reason,
            "completion_tokens": len(ids) if total is None else total,
            "output_token_logprobs": entries,
            "weight_version": "3",
            **meta,
        },
    }


def test_our_server_returns_the_version_of_every_token():
    found = parse_generate_output(
        payload([5, 6, 7], finish="stop", weight_versions=[[0, "3"], [2, "4"]])
    )
    assert found.completion.versions == (Segment(3, 2), Segment(4, 1))
    assert found.matched == 9


def test_sglang_returns_one_version_for_the_whole_output():
    found = parse_generate_output(payload([5, 6, 7], finish="length", weight_version="default"))
    assert found.completion.versions == (Segment(0, 3),)


@pytest.mark.parametrize("incremental", [False, True])
def test_cumulative_and_incremental_streams(incremental):
    ids, so_far = [5, 6, 7, 8], None
    for end, version in ((1, "3"), (3, "3"), (4, "4")):
        start = 0 if not incremental or so_far is None else len(so_far.token_ids)
        finish = "stop" if end == 4 else None
        part = payload(ids[start:end], total=end, finish=finish, weight_version=version)
        so_far = parse_generate_output(part, so_far)
    assert so_far.completion.token_ids == (5, 6, 7, 8)
    assert so_far.completion.versions == (Segment(3, 3), Segment(4, 1))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"text": "hello"}, "not a /generate response"),
        (payload([5, 6], total=3, finish="stop"), "completion_tokens is 3, but 2"),
        (payload([5], finish="stop") | {"output_ids": [6]}, "output_ids"),
        (payload([5], finish="stop", output_token_logprobs=None), "output_token_logprobs"),
        (payload([5], finish="stop", weight_version="latest"), "contains no number"),
        (payload([5], finish="stop", weight_versions=[[1, "3"]]), "first token"),
        (payload([5], finish="eaten"), "finish_reason"),
    ],
)
def test_an_output_that_cannot_be_trained_on_is_rejected(wrong, why):
    with pytest.raises(ApiError, match=why):
        parse_generate_output(wrong)


def test_an_unfinished_output_has_no_completion():
    with pytest.raises(ApiError, match="ended before"):
        parse_generate_output(payload([5])).completion  # noqa: B018


def test_prompt_logprobs():
    rows = {"meta_info": {"input_token_logprobs": [[None, 1, None], [-0.1, 2, None], [-0.2, 3, 0]]}}
    assert parse_prompt_logprobs(rows, 1, 2) == (-0.1, -0.2)
    with pytest.raises(ApiError, match="first token"):
        parse_prompt_logprobs(rows, 0, 3)
    with pytest.raises(ApiError, match="3 for 4"):
        parse_prompt_logprobs(rows, 0, 4)
