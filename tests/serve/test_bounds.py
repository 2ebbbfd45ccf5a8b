"""What a request may be long in, and what it may not have repeated to it without end."""

import pytest

LONG = "one two three four five six seven eight nine ten " * 40_000  # 2 MB


@pytest.fixture
def encoded(live, monkeypatch):
    """How many characters the tokenizer has been given."""
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
def test_text_that_is_far_too_long_is_refused_before_it_is_tokenized(live, encoded, path, body):
    found = live.post(path, body)
    assert found.status_code == 400, found.text[:300]
    assert "prompt is too long: at least" in found.json()["error"]["message"]
    assert encoded[0] < len(LONG) / 2
