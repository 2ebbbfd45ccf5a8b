"""Completions, /generate and bodies: requests parsed, refused and mended."""

import pytest

from paddock.api.body import parse_body
from paddock.api.openai_chat_request import ChatCompletionBody
from paddock.api.openai_completions import CompletionBody, parse_completion_requests
from paddock.api.sglang_request import GenerateBody, parse_generate_requests
from paddock.http.json_body import parse_json
from paddock.records import ApiError
from tests.api.test_chat_requests import DEFAULTS, chat_of


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
    ],
)
def test_the_four_shapes_of_a_prompt(prompt, expected):
    asks = parse_completion_requests(
        parse_body(CompletionBody, {"prompt": prompt}), DEFAULTS, max_completions=9
    )
    assert [ask.prompt for ask in asks] == expected
    assert asks[0].sampling.max_new_tokens == 16


def test_a_prompt_can_be_scored_alone():
    (ask,) = parse_completion_requests(
        parse_body(CompletionBody, {"prompt": "a", "echo": True, "max_tokens": 0}),
        DEFAULTS,
        max_completions=9,
    )
    assert ask.scores_only and ask.sampling.max_new_tokens == 1
    with pytest.raises(ApiError, match="max_tokens"):
        parse_completion_requests(
            parse_body(CompletionBody, {"prompt": "a", "max_tokens": 0}),
            DEFAULTS,
            max_completions=9,
        )


def test_a_native_request_has_the_defaults_of_its_own_dialect():
    (ask,), many = parse_generate_requests(
        parse_body(GenerateBody, {"input_ids": [1, 2]}), max_completions=9
    )
    assert not many and ask.prompt == (1, 2)
    assert (ask.sampling.max_new_tokens, ask.sampling.temperature) == (128, 1.0)
    assert ask.top_logprobs is None and ask.prompt_logprobs_start is None
    body = {"input_ids": [1], "logprob_start_len": 0}
    (unasked,), _ = parse_generate_requests(parse_body(GenerateBody, body), max_completions=9)
    (asked,), _ = parse_generate_requests(
        parse_body(GenerateBody, body | {"return_logprob": True}), max_completions=9
    )
    assert (unasked.prompt_logprobs_start, asked.prompt_logprobs_start) == (None, 0)


@pytest.mark.parametrize(
    ("kind", "make", "body"),
    [
        (GenerateBody, parse_generate_requests, {"input_ids": [[1]] * 10}),
        (
            GenerateBody,
            parse_generate_requests,
            {"input_ids": [[1]] * 3, "sampling_params": {"n": 4}},
        ),
        (
            GenerateBody,
            parse_generate_requests,
            {"input_ids": [1], "sampling_params": {"n": 10**9}},
        ),
        (
            CompletionBody,
            lambda b, max_completions: parse_completion_requests(
                b, DEFAULTS, max_completions=max_completions
            ),
            {"prompt": ["a"] * 10},
        ),
    ],
)
def test_one_request_cannot_ask_for_a_crowd(kind, make, body):
    with pytest.raises(ApiError, match="at most 9"):
        make(parse_body(kind, body), max_completions=9)


@pytest.mark.parametrize(
    "wrong",
    [
        {"stop": ["x"] * 65},
        {"stop": "x" * 1001},
        {"logit_bias": {str(i): 1 for i in range(1025)}},
    ],
)
def test_what_would_slow_every_token_down_is_refused(wrong):
    with pytest.raises(ApiError, match=r"at most|longer than"):
        chat_of(**wrong)


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff", "not valid UTF-8: invalid start byte at byte 0"),
        (b'{"a": Infinity}', "Infinity is not a JSON number"),
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply|more than 100 levels"),
    ],
)
def test_bytes_that_are_no_json(data, message):
    with pytest.raises(ApiError, match=message):
        parse_json(data)


def test_halves_of_pairs_are_mended():
    assert parse_json(b'{"a": "\\ud83d", "b": "\\ud83d\\ude00"}') == {
        "a": "\ufffd",
        "b": "\U0001f600",
    }


def test_a_body_must_be_an_object():
    for value in ([], None, "x", 3):
        with pytest.raises(ApiError, match="must be a JSON object"):
            parse_body(ChatCompletionBody, value)


@pytest.mark.parametrize(
    ("params", "name"),
    [({"max_new_tokens": -1}, "max_new_tokens"), ({"stop_token_ids": [-1]}, "stop_token_ids")],
)
def test_a_native_client_hears_its_own_names(params, name):
    with pytest.raises(ApiError, match=rf"^{name}:") as refused:
        parse_generate_requests(
            parse_body(GenerateBody, {"input_ids": [1], "sampling_params": params}),
            max_completions=9,
        )
    assert refused.value.param == name
