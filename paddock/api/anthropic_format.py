"""Anthropic Messages (`/v1/messages`): responses and stream events."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paddock.records import Message, RequestOutput
from paddock.text import parse_events

# Reasoning is not signed, and reasoning that clients send back is not verified. The value must not
# be empty: clients attribute unsigned thinking blocks to another model and drop them.
SIGNATURE = "unsigned"


def format_message(id: str, model: str, message: Message, output: RequestOutput) -> dict[str, Any]:
    return message_envelope(id, model) | {
        "content": content_blocks(message),
        **stop_fields(output, calls=len(message.tool_calls)),
        "usage": anthropic_usage(output),
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
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": SIGNATURE})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        arguments = dict(call.arguments)
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return blocks


def stop_fields(output: RequestOutput, *, calls: int) -> dict[str, Any]:
    """The fields `stop_reason` and `stop_sequence`."""
    matched = output.matched_stop if isinstance(output.matched_stop, str) else None
    reason = {"stop": "end_turn", "length": "max_tokens", "abort": "end_turn"}
    stop_reason = reason[output.completion.finish]
    if output.completion.finish == "stop" and calls:
        stop_reason = "tool_use"
    if matched is not None:
        stop_reason = "stop_sequence"
    return {"stop_reason": stop_reason, "stop_sequence": matched}


def anthropic_usage(output: RequestOutput) -> dict[str, int]:
    """Token usage; `input_tokens` excludes prompt tokens served from the prefix cache."""
    return {
        "input_tokens": output.prompt_tokens - output.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": output.cached_tokens,
        "output_tokens": len(output.completion.token_ids),
    }


@dataclass(slots=True)
class MessageStream:
    """Stream events of one completion. Content blocks follow each other; one is open at a time."""

    id: str
    model: str
    prompt_tokens: int
    _index: int = -1
    _kind: str | None = None  # of the open block

    def open(self) -> list[dict[str, Any]]:
        # Cached tokens are not known yet; the last event reports them.
        usage = {
            "input_tokens": self.prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        }
        message = message_envelope(self.id, self.model) | {"usage": usage}
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def push(self, events: Sequence[parse_events.ParseEvent]) -> list[dict[str, Any]]:
        return [payload for event in events for payload in self._payloads(event)]

    def close(self, output: RequestOutput, *, calls: int) -> list[dict[str, Any]]:
        last = {
            "type": "message_delta",
            "delta": stop_fields(output, calls=calls),
            "usage": anthropic_usage(output),
        }
        return [*self._close_block(), last, {"type": "message_stop"}]

    def _payloads(self, event: parse_events.ParseEvent) -> Iterator[dict[str, Any]]:
        match event:
            case parse_events.ReasoningDelta(text):
                block = {"type": "thinking", "thinking": "", "signature": ""}
                yield from self._switch_block("thinking", block)
                yield self._delta(type="thinking_delta", thinking=text)
            case parse_events.ContentDelta(text):
                yield from self._switch_block("text", {"type": "text", "text": ""})
                yield self._delta(type="text_delta", text=text)
            case parse_events.ToolCallStart(_, id, name):
                yield from self._close_block()
                call = {"type": "tool_use", "id": id, "name": name, "input": {}}
                yield from self._switch_block("tool_use", call)
            case parse_events.ToolCallArgumentsDelta(_, text):
                yield self._delta(type="input_json_delta", partial_json=text)
            case parse_events.ToolCallEnd():
                yield from self._close_block()

    def _switch_block(self, kind: str, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Open a block of this kind, unless one is open already."""
        if self._kind == kind:
            return
        yield from self._close_block()
        self._index, self._kind = self._index + 1, kind
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close_block(self) -> Iterator[dict[str, Any]]:
        if self._kind == "thinking":
            yield self._delta(type="signature_delta", signature=SIGNATURE)
        if self._kind is not None:
            yield {"type": "content_block_stop", "index": self._index}
        self._kind = None

    def _delta(self, **delta: Any) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}
