"""What is wrong with a request, in the words of each dialect."""

from typing import Any

from paddock.records import ApiError

# The name that each dialect gives a status.
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


def check_completion_count(replies: int, most: int) -> None:
    """One request may not ask for more than could ever be answered."""
    if replies > most:
        raise ApiError(f"{replies} replies are asked for at once, more than {most}")


def openai_error(error: ApiError) -> dict[str, Any]:
    return {
        "error": {
            "message": error.message,
            "type": _OPENAI.get(error.status, "server_error"),
            "param": error.param,
            "code": error.code,
        }
    }


def anthropic_error(error: ApiError) -> dict[str, Any]:
    kind = _ANTHROPIC.get(error.status, "api_error")
    shown: dict[str, Any] = {"type": kind, "message": error.message}
    if error.code is not None:
        shown["details"] = {"error_code": error.code}
    return {"type": "error", "error": shown}


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
    """As the Responses API says it in the middle of a stream."""
    kind = error.code or _OPENAI.get(error.status, "server_error")
    return {"type": "error", "code": kind, "message": error.message, "param": error.param}
