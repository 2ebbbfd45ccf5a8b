"""Anthropic's `/v1/messages`: how it answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paddock.api.delta_parser import RequestOutputLike
from paddock.records import Message
from paddock.text import parse_events

# Nothing is signed, and whoever sends thoughts back is believed. But it is not empty: clients take
# thoughts without a signature for another model's, and leave them out of the next request.
SIGNATURE = "unsigned"


def format_message(
    id: str, model: str, message: Message, answer: RequestOutputLike
) -> dict[str, Any]:
    return message_envelope(id, model) | {
        "content": content_blocks(message),
        **stop_fields(answer, calls=len(message.tool_calls)),
        "usage": anthropic_usage(answer),
    }


def message_envelope(id: str, model: str) -> dict[str, Any]:
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def content_blocks(message: Message) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if message.reasoning:
        thought = {"type": "thinking", "thinking": message.reasoning, "signature": SIGNATURE}
        found.append(thought)
    if message.content:
        found.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        used = {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)}
        found.append(used)
    return found


def stop_fields(answer: RequestOutputLike, *, calls: int) -> dict[str, Any]:
    """`stop_reason` and `stop_sequence`."""
    matched = answer.matched_stop if isinstance(answer.matched_stop, str) else None
    reason = {"stop": "end_turn", "length": "max_tokens", "abort": "end_turn"}
    said = reason[answer.completion.finish]
    if answer.completion.finish == "stop" and calls:
        said = "tool_use"
    if matched is not None:
        said = "stop_sequence"
    return {"stop_reason": said, "stop_sequence": matched}


def anthropic_usage(answer: RequestOutputLike) -> dict[str, int]:
    """`input_tokens` are those that were not found in the cache."""
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": len(answer.completion.token_ids),
    }


@dataclass(slots=True)
class MessageStream:
    """One reply, event by event: blocks follow each other, one open at a time."""

    id: str
    model: str
    prompt_tokens: int
    _index: int = -1
    _kind: str | None = None  # of the open block

    def open(self) -> list[dict[str, Any]]:
        # What the cache held is not known yet; the last event says it.
        counts = {
            "input_tokens": self.prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        }
        message = message_envelope(self.id, self.model) | {"usage": counts}
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def push(self, events: Sequence[parse_events.ParseEvent]) -> list[dict[str, Any]]:
        return [payload for event in events for payload in self._payloads(event)]

    def close(self, answer: RequestOutputLike, *, calls: int) -> list[dict[str, Any]]:
        last = {
            "type": "message_delta",
            "delta": stop_fields(answer, calls=calls),
            "usage": anthropic_usage(answer),
        }
        return [*self._shut(), last, {"type": "message_stop"}]

    def _payloads(self, event: parse_events.ParseEvent) -> Iterator[dict[str, Any]]:
        match event:
            case parse_events.ReasoningDelta(text):
                block = {"type": "thinking", "thinking": "", "signature": ""}
                yield from self._turn("thinking", block)
                yield self._delta(type="thinking_delta", thinking=text)
            case parse_events.ContentDelta(text):
                yield from self._turn("text", {"type": "text", "text": ""})
                yield self._delta(type="text_delta", text=text)
            case parse_events.ToolCallStart(_, id, name):
                yield from self._shut()
                call = {"type": "tool_use", "id": id, "name": name, "input": {}}
                yield from self._turn("tool_use", call)
            case parse_events.ToolCallArgumentsDelta(_, text):
                yield self._delta(type="input_json_delta", partial_json=text)
            case parse_events.ToolCallEnd():
                yield from self._shut()

    def _turn(self, kind: str, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Another block, unless one of this kind is open."""
        if self._kind == kind:
            return
        yield from self._shut()
        self._index, self._kind = self._index + 1, kind
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _shut(self) -> Iterator[dict[str, Any]]:
        if self._kind == "thinking":
            yield self._delta(type="signature_delta", signature=SIGNATURE)
        if self._kind is not None:
            yield {"type": "content_block_stop", "index": self._index}
        self._kind = None

    def _delta(self, **delta: Any) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}
