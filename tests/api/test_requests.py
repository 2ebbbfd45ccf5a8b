"""Completion and /generate requests and raw bodies: parsing, limits, errors."""

import pytest

from paddock.api.body import parse_body
from paddock.api.openai_chat_request import ChatCompletionBody
from paddock.api.openai_completions import CompletionBody, parse_completion_requests
from paddock.api.sglang_request import GenerateBody, parse_generate_requests
from paddock.http.json_body import parse_json
from paddock.records import ApiError
from tests.api.test_chat_requests import DEFAULTS, chat_request


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
    requests = parse_completion_requests(
        parse_body(CompletionBody, {"prompt": prompt}), DEFAULTS, max_completions=9
    )
    assert [request.prompt for request in requests] == expected
    assert requests[0].sampling.max_new_tokens == 16


def test_a_prompt_can_be_scored_without_generation():
    (request,) = parse_completion_requests(
        parse_body(CompletionBody, {"prompt": "a", "echo": True, "max_tokens": 0}),
        DEFAULTS,
        max_completions=9,
    )
    assert request.scores_only and request.sampling.max_new_tokens == 1
    with pytest.raises(ApiError, match="max_tokens"):
        parse_completion_requests(
            parse_body(CompletionBody, {"prompt": "a", "max_tokens": 0}),
            DEFAULTS,
            max_completions=9,
        )


def test_generate_requests_have_sglang_defaults():
    (request,), many = parse_generate_requests(
        parse_body(GenerateBody, {"input_ids": [1, 2]}), max_completions=9
    )
    assert not many and request.prompt == (1, 2)
    assert (request.sampling.max_new_tokens, request.sampling.temperature) == (128, 1.0)
    assert request.top_logprobs is None and request.prompt_logprobs_start is None
    body = {"input_ids": [1], "logprob_start_len": 0}
    (unscored,), _ = parse_generate_requests(parse_body(GenerateBody, body), max_completions=9)
    (parse_body_,), _ = parse_generate_requests(
        parse_body(GenerateBody, body | {"return_logprob": True}), max_completions=9
    )
    assert (unscored.prompt_logprobs_start, parse_body_.prompt_logprobs_start) == (None, 0)


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
def test_the_number_of_choices_per_request_is_limited(kind, make, body):
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
def test_expensive_sampling_fields_are_limited(wrong):
    with pytest.raises(ApiError, match=r"at most|longer than"):
        chat_request(**wrong)


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
def test_invalid_json_is_rejected(data, message):
    with pytest.raises(ApiError, match=message):
        parse_json(data)


def test_lone_surrogates_are_replaced():
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
def test_errors_of_generate_use_sglang_names(params, name):
    with pytest.raises(ApiError, match=rf"^{name}:") as refused:
        parse_generate_requests(
            parse_body(GenerateBody, {"input_ids": [1], "sampling_params": params}),
            max_completions=9,
        )
    assert refused.value.param == name
