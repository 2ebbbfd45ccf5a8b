"""Errors that an HTTP API reports to its client."""

from dataclasses import dataclass

MAX_MESSAGE_CHARS = 1000  # messages quote client input, which may be long


@dataclass(eq=False)
class ApiError(ValueError):
    """A request that cannot be served, with the HTTP status to answer.

    `param` names the offending field; `code` is a machine-readable word that clients match on, such
    as context_length_exceeded. Messages longer than MAX_MESSAGE_CHARS are truncated.
    """

    message: str
    status: int = 400
    param: str | None = None
    code: str | None = None

    def __post_init__(self) -> None:
        if len(self.message) > MAX_MESSAGE_CHARS:
            self.message = f"{self.message[:MAX_MESSAGE_CHARS]} ..."

    def __str__(self) -> str:
        return self.message

    @property
    def retryable(self) -> bool:
        return self.status in (409, 429, 503)
