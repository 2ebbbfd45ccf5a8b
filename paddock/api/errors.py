"""Error bodies of the OpenAI, Anthropic and SGLang APIs."""

from typing import Any

from paddock.records import ApiError

# Error type of each status.
_OPENAI = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_ANTHROPIC = _OPENAI | {500: "api_error", 503: "overloaded_error"}


def check_completion_count(completions: int, max_completions: int) -> None:
    """Reject a request for more completions than a replica can queue and run."""
    if completions > max_completions:
        raise ApiError(
            f"{completions} completions requested, at most {max_completions} are allowed"
        )


def openai_error(error: ApiError) -> dict[str, Any]:
    """
    >>> openai_error(ApiError("temperature: -1 is negative", param="temperature"))["error"]["type"]
    'invalid_request_error'
    """
    return {
        "error": {
            "message": error.message,
            "type": _OPENAI.get(error.status, "server_error"),
            "param": error.param,
            "code": error.code,
        }
    }


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """
    >>> anthropic_error(ApiError("invalid API key", status=401))["error"]["type"]
    'authentication_error'
    """
    kind = _ANTHROPIC.get(error.status, "api_error")
    body: dict[str, Any] = {"type": kind, "message": error.message}
    if error.code is not None:
        body["details"] = {"error_code": error.code}
    return {"type": "error", "error": body}


def sglang_error(error: ApiError) -> dict[str, Any]:
    return {
        "error": {
            "message": error.message,
            "type": _OPENAI.get(error.status, "server_error"),
            "code": error.status,
            "param": error.param,
            "retryable": error.retryable,
        }
    }


def responses_error_event(error: ApiError) -> dict[str, Any]:
    """The error event of a Responses stream."""
    kind = error.code or _OPENAI.get(error.status, "server_error")
    return {"type": "error", "code": kind, "message": error.message, "param": error.param}
