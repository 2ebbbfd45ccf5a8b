"""API keys in request headers, compared in constant time."""

from collections.abc import Mapping
from hmac import compare_digest


def api_key_from_headers(headers: Mapping[str, str]) -> str | None:
    """The API key of a request: a bearer token (OpenAI clients) or x-api-key (Anthropic clients).

    >>> api_key_from_headers({"authorization": "Bearer a"}), api_key_from_headers({})
    ('a', None)
    >>> api_key_from_headers({"x-api-key": "b"})
    'b'
    """
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")


def has_api_key(headers: Mapping[str, str], key: str | None) -> bool:
    """Whether the request carries `key`, compared in constant time. None never matches.

    >>> has_api_key({"x-api-key": "b"}, "b"), has_api_key({}, "b")
    (True, False)
    >>> has_api_key({"x-api-key": "b"}, None)
    False
    """
    sent = api_key_from_headers(headers)
    return sent is not None and key is not None and compare_digest(sent.encode(), key.encode())
