"""API keys: how clients send them, and how they are compared."""

from collections.abc import Mapping
from hmac import compare_digest


def api_key_from_headers(headers: Mapping[str, str]) -> str | None:
    """The key of a request: as OpenAI's clients send it, or else as Anthropic's do.

    >>> api_key_from_headers({"authorization": "Bearer a"}), api_key_from_headers({"x-api-key": "b"}), api_key_from_headers({})
    ('a', 'b', None)
    """
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")


def has_api_key(headers: Mapping[str, str], key: str | None) -> bool:
    """Whether a request was sent with this key, compared in constant time. None matches nothing.

    >>> has_api_key({"x-api-key": "b"}, "b"), has_api_key({}, "b"), has_api_key({"x-api-key": "b"}, None)
    (True, False, False)
    """
    sent = api_key_from_headers(headers)
    return sent is not None and key is not None and compare_digest(sent.encode(), key.encode())
