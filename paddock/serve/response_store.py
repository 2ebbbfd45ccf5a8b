"""Responses that are kept for the next one, for a bounded time and number."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

from paddock.api import openai_responses_request
from paddock.records import Message, json_codec


@dataclass(frozen=True, slots=True)
class StoredResponse:
    response: dict[str, Any]  # as the client got it
    previous: openai_responses_request.PreviousResponse
    size: int
    since: float


class ResponseStore:
    """The newest `most` responses that are younger than `seconds`, in `most_bytes` together.

    >>> now = 0.0
    >>> kept = ResponseStore(most=2, seconds=60, most_bytes=1000, clock=lambda: now)
    >>> for name in ("a", "b", "c"):
    ...     kept.put({"id": name}, (), "s")
    >>> [kept.get(name) is not None for name in ("a", "b", "c")]
    [False, True, True]
    >>> now = 61.0
    >>> kept.get("c") is None, len(kept)
    (True, 0)
    """

    def __init__(
        self,
        *,
        most: int,
        seconds: float,
        most_bytes: int,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.most, self.seconds, self.most_bytes = most, seconds, most_bytes
        self._clock, self._bytes = clock, 0
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._kept)

    def put(
        self, response: dict[str, Any], messages: tuple[Message, ...], session: str | None
    ) -> None:
        name = response["id"]
        size = len(json_codec.json_bytes(response)) + sum(map(_size, messages))
        previous = openai_responses_request.PreviousResponse(
            messages=messages, session=session or name
        )
        self._kept[name] = StoredResponse(response, previous, size, self._clock())
        self._bytes += size
        self._forget()

    def get(self, name: str) -> StoredResponse | None:
        self._forget()
        return self._kept.get(name)

    def delete(self, name: str) -> None:
        self._bytes -= self._kept.pop(name).size

    def _forget(self) -> None:
        oldest = self._clock() - self.seconds
        while self._kept:
            name, first = next(iter(self._kept.items()))
            fits = len(self._kept) <= self.most and self._bytes <= self.most_bytes
            if fits and first.since > oldest:
                return
            self.delete(name)


def _size(message: Message) -> int:
    """At most what it takes: responses of one conversation share their messages."""
    calls = sum(len(call.name) + len(str(call.arguments)) for call in message.tool_calls)
    return len(message.content) + len(message.reasoning or "") + calls + 200
