"""The HTTP APIs that a path may belong to: their error bodies and stream conventions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paddock.api import errors
from paddock.records import ApiError


@dataclass(frozen=True, slots=True)
class ApiProtocol:
    """How one API writes errors and streams."""

    name: str
    error: Callable[[ApiError], dict[str, Any]]
    event: Callable[[ApiError], dict[str, Any]]  # an error in the middle of a stream
    named: bool = False  # events carry their type on an `event:` line
    done: bool = True  # a stream ends with `data: [DONE]`


SGLANG = ApiProtocol("sglang", errors.sglang_error, errors.sglang_error)
OPENAI = ApiProtocol("openai", errors.openai_error, errors.openai_error)
RESPONSES = ApiProtocol(
    "responses", errors.openai_error, errors.responses_error_event, named=True, done=False
)
ANTHROPIC = ApiProtocol(
    "anthropic", errors.anthropic_error, errors.anthropic_error, named=True, done=False
)


def protocol_for_path(path: str) -> ApiProtocol:
    """The API that a path belongs to, whether or not the path is routed.

    >>> protocol_for_path("/v1/messages").name, protocol_for_path("/sessions/7/v1/responses").name
    ('anthropic', 'responses')
    """
    for part, protocol in (
        ("/v1/messages", ANTHROPIC),
        ("/v1/responses", RESPONSES),
        ("/v1/", OPENAI),
    ):
        if path.startswith(part) or (path.startswith("/sessions/") and part in path):
            return protocol
    return SGLANG
