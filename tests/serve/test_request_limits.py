"""Limits of requests: text length, model names, request ids, lists and error messages."""

import pytest

LONG = "one two three four five six seven eight nine ten " * 40_000  # 2 MB


@pytest.fixture
def encoded(live, monkeypatch):
    """Counts the characters given to the tokenizer."""
    count, encode = [0], live.tokenizer.encode

    def counted(text, *, specials):
        count[0] += len(text)
        return encode(text, specials=specials)

    monkeypatch.setattr(live.tokenizer, "encode", counted)
    return count


def user(content):
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": user(LONG)}),
        ("/v1/messages", {"messages": user(LONG), "max_tokens": 1}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/completions", {"prompt": ["x", LONG]}),
        ("/generate", {"text": LONG}),
        ("/tokenize", {"prompt": LONG}),
        ("/tokenize", {"messages": user(LONG)}),
        ("/v1/messages/count_tokens", {"messages": user(LONG)}),
        ("/apply-template", {"messages": user(LONG)}),
        ("/v1/chat/completions", {"messages": user("x") * 20_000}),
    ],
)
def test_far_too_long_text_is_rejected_before_tokenization(live, encoded, path, body):
    found = live.post(path, body)
    assert found.status_code == 400, found.text[:300]
    assert "prompt is too long: at least" in found.json()["error"]["message"]
    assert encoded[0] < len(LONG) / 2


# --- names ----------------------------------------------------------------------------------------

HELLO = user("Say hello.")
MODELS = [
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 1}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 1}),
    ("/v1/messages/count_tokens", {"messages": HELLO}),
    ("/tokenize", {"prompt": "x"}),
    ("/detokenize", {"tokens": [1]}),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 1}}),
]


@pytest.mark.parametrize(("path", "body"), MODELS)
def test_a_model_that_is_not_served_is_not_found(live, path, body):
    found = live.post(path, body | {"model": "gpt-9"})
    error = found.json()["error"]
    assert found.status_code == 404, found.text
    assert error["message"] == "model 'gpt-9' not found; served models: 'tiny', 'm', 'glm-5[1m]'"
    assert error["type"] == "not_found_error"
    for name in ("tiny", "m", "", None):  # any served name, or none
        assert live.post(path, body | {"model": name}).status_code == 200


def test_the_error_for_an_unknown_model_is_readable_by_openai_clients(live):
    error = live.post(MODELS[0][0], MODELS[0][1] | {"model": "x" * 10_000}).json()["error"]
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert len(error["message"]) < 200


def test_generate_accepts_any_model_name(live):
    """As in SGLang: routers send arbitrary values."""
    body = {"input_ids": [5], "model": "gpt-9", "sampling_params": {"max_new_tokens": 1}}
    assert live.post("/generate", body).status_code == 200


def test_every_served_name_is_listed(live):
    names = [model["id"] for model in live.get("/v1/models").json()["data"]]
    assert names == ["tiny", "m", "glm-5[1m]"]
    assert live.get("/v1/models/m").json()["id"] == "m"
    assert live.get("/v1/models/gpt-9").status_code == 404


FORGED = "a\n12:00:00 INFO b replica=0 prompt=1"


@pytest.mark.parametrize("rid", [FORGED, "a\x1b[2J", "a\u2028b", "x" * 300, ["a\rb"]])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 1}}),
    ],
)
def test_a_request_id_cannot_forge_log_lines(live, path, body, rid, caplog):
    key = "request_id" if path.startswith("/inference") else "rid"
    with caplog.at_level("INFO", "paddock"):
        found = live.post(path, body | {key: rid})
    assert found.status_code == 400
    assert all(line.getMessage().isprintable() for line in caplog.records)


# --- lists and echoes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"token_ids_logprob": [1] * 2000, "return_logprob": True}),
        ("/generate", {"sampling_params": {"stop_token_ids": [1] * 2000}}),
        ("/v1/chat/completions", {"stop_token_ids": [1] * 2000}),
        ("/v1/responses", {"metadata": {str(i): "x" for i in range(17)}}),
        ("/v1/responses", {"metadata": {"a": "x" * 513}}),
        ("/v1/responses", {"metadata": {"a" * 65: "x"}}),
        ("/v1/responses", {"metadata": {"a": {"b": 1}}}),
        ("/v1/responses", {"tools": [{"type": "web_search", "x": LONG}]}),
        ("/v1/responses", {"reasoning": {"x": LONG}}),
        ("/v1/responses", {"text": {"x": LONG}}),
    ],
)
def test_lists_and_repetitions_are_bounded(live, path, body):
    prompt_fields = {"input_ids": [5], "messages": HELLO, "input": "x"}
    found = live.post(path, prompt_fields | body)
    assert found.status_code == 400
    assert len(found.content) < 2000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": LONG, "content": "x"}]}),
        ("/v1/chat/completions", {"messages": HELLO, "tools": [{"type": "function", "x": LONG}]}),
        ("/v1/chat/completions", {"messages": HELLO, "thinking": {"type": LONG}}),
        ("/v1/chat/completions", {"messages": HELLO, "response_format": {"type": LONG}}),
        ("/generate", {"input_ids": [5], "sampling_params": {"regex": "(" + LONG}}),
        ("/abort_request", {"rid": LONG}),
        ("/update_weights_from_disk", {"model_path": LONG}),
        ("/get_weights_by_name", {"name": LONG}),
    ],
)
def test_an_error_does_not_echo_the_whole_input(live, path, body):
    assert len(live.post(path, body).content) < 2000
