"""Store of responses for `previous_response_id`, bounded in number, bytes and age."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

from paddock.api import openai_responses_request
from paddock.records import Message, json_codec


@dataclass(frozen=True, slots=True)
class StoredResponse:
    response: dict[str, Any]  # as sent to the client
    previous: openai_responses_request.PreviousResponse
    size: int
    stored_at: float


class ResponseStore:
    """The newest `max_responses` responses younger than `ttl_s`, together at most `max_bytes`.

    >>> now = 0.0
    >>> store = ResponseStore(max_responses=2, ttl_s=60, max_bytes=1000, clock=lambda: now)
    >>> for name in ("a", "b", "c"):
    ...     store.put({"id": name}, (), "s")
    >>> [store.get(name) is not None for name in ("a", "b", "c")]
    [False, True, True]
    >>> now = 61.0
    >>> store.get("c") is None, len(store)
    (True, 0)
    """

    def __init__(
        self,
        *,
        max_responses: int,
        ttl_s: float,
        max_bytes: int,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.max_responses, self.ttl_s, self.max_bytes = max_responses, ttl_s, max_bytes
        self._clock, self._bytes = clock, 0
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._responses)

    def put(
        self, response: dict[str, Any], messages: tuple[Message, ...], session: str | None
    ) -> None:
        name = response["id"]
        size = len(json_codec.json_bytes(response)) + sum(map(_message_bytes, messages))
        previous = openai_responses_request.PreviousResponse(
            messages=messages, session=session or name
        )
        self._responses[name] = StoredResponse(response, previous, size, self._clock())
        self._bytes += size
        self._evict()

    def get(self, name: str) -> StoredResponse | None:
        self._evict()
        return self._responses.get(name)

    def delete(self, name: str) -> None:
        self._bytes -= self._responses.pop(name).size

    def _evict(self) -> None:
        oldest = self._clock() - self.ttl_s
        while self._responses:
            name, first = next(iter(self._responses.items()))
            fits = len(self._responses) <= self.max_responses and self._bytes <= self.max_bytes
            if fits and first.stored_at > oldest:
                return
            self.delete(name)


def _message_bytes(message: Message) -> int:
    """An upper bound: responses of one conversation share their messages."""
    calls = sum(len(call.name) + len(str(call.arguments)) for call in message.tool_calls)
    return len(message.content) + len(message.reasoning or "") + calls + 200
