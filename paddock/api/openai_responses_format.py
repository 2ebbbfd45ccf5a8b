"""OpenAI Responses (`/v1/responses`): responses and stream events.

The output is a list of items: reasoning, a message, function calls. A stream reports the start,
the deltas and the end of each item; the last event holds all items.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from paddock.api.openai_responses_request import ResponsesRequest
from paddock.api.token_decoder import TokenDecoder, format_chat_logprobs
from paddock.records import Message, OutputDelta, RequestOutput
from paddock.text import parse_events

ResponseItem = dict[str, Any]


def responses_usage(output: RequestOutput) -> dict[str, Any]:
    written = len(output.completion.token_ids)
    return {
        "input_tokens": output.prompt_tokens,
        "input_tokens_details": {"cached_tokens": output.cached_tokens},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": output.reasoning_tokens},
        "total_tokens": output.prompt_tokens + written,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesEnvelope:
    """The response object around the output items."""

    id: str
    model: str
    created: int
    request: ResponsesRequest
    token_decoder: TokenDecoder

    def response_object(
        self, items: Sequence[ResponseItem], output: RequestOutput | None
    ) -> dict[str, Any]:
        """The response object; `output` is None while it is in progress."""
        status, incomplete = "in_progress", None
        if output is not None:
            truncated = output.completion.finish == "length"
            incomplete = {"reason": "max_output_tokens"} if truncated else None
            status = "incomplete" if truncated else "completed"
            if output.completion.finish == "abort":
                status = "cancelled"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model,
            "output": list(items),
            "usage": None if output is None else responses_usage(output),
            "error": None,
            "incomplete_details": incomplete,
            **self.request.echoed,
        }

    def format_response(self, message: Message, output: RequestOutput) -> dict[str, Any]:
        items: list[ResponseItem] = []
        suffix = self.id.removeprefix("resp_")
        if message.reasoning:
            items.append(
                _reasoning_item(f"rs_{suffix}_{len(items)}", message.reasoning, "completed")
            )
        if message.content or not (items or message.tool_calls):
            entries: list[dict[str, Any]] = []
            if self.request.top_logprobs is not None:
                done, top = (
                    output.completion,
                    output.top_logprobs if self.request.top_logprobs else (),
                )
                entries = format_chat_logprobs(
                    self.token_decoder, done.token_ids, done.logprobs, top
                )
            part = _text_part(message.content, entries)
            items.append(_message_item(f"msg_{suffix}_{len(items)}", [part], "completed"))
        for call in message.tool_calls:
            item = self.function_call_item(f"fc_{suffix}_{len(items)}", call.id, call.name)
            item["arguments"] = json.dumps(call.arguments, ensure_ascii=False)
            items.append(item | {"status": "completed"})
        return self.response_object(items, output)

    def function_call_item(self, id: str, call_id: str, name: str) -> ResponseItem:
        """A call that is in progress, under the names that the client gave its function."""
        namespace, own = self.request.namespaces.get(name, (None, name))
        return {
            "id": id,
            "type": "function_call",
            "status": "in_progress",
            "call_id": call_id,
            "name": own,
            "arguments": "",
            **({} if namespace is None else {"namespace": namespace}),
        }


def _reasoning_item(id: str, text: str, status: str) -> ResponseItem:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": id, "type": "reasoning", "summary": [], "content": content, "status": status}


def _message_item(id: str, content: list[dict[str, Any]], status: str) -> ResponseItem:
    return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


@dataclass(slots=True)
class ResponseStream:
    """Stream events of one response. Log-probabilities are sent with the next text delta; those of
    tokens after the last delta with the end of the message."""

    envelope: ResponsesEnvelope
    _number: int = 0
    _items: list[ResponseItem] = field(default_factory=list)
    _open: str | None = None  # type of the open item
    _text: str = ""
    _pending: list[dict[str, Any]] = field(default_factory=list)
    _sent: list[dict[str, Any]] = field(default_factory=list)

    def open(self) -> list[dict[str, Any]]:
        response = self.envelope.response_object([], None)
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def push(
        self, events: Sequence[parse_events.ParseEvent], delta: OutputDelta
    ) -> list[dict[str, Any]]:
        request = self.envelope.request
        if request.top_logprobs is not None:
            top = delta.top_logprobs if request.top_logprobs else ()
            self._pending += format_chat_logprobs(
                self.envelope.token_decoder, delta.token_ids, delta.logprobs, top
            )
        return [payload for event in events for payload in self._payloads(event)]

    def close(self, output: RequestOutput) -> list[dict[str, Any]]:
        found = list(self._close_item())
        if not self._items:
            found += [*self._open_item("message"), *self._close_item()]
        response = self.envelope.response_object(self._items, output)
        kind = "incomplete" if response["status"] == "incomplete" else "completed"
        return [*found, self._event(f"response.{kind}", response=response)]

    def _payloads(self, event: parse_events.ParseEvent) -> Iterator[dict[str, Any]]:
        match event:
            case parse_events.ReasoningDelta(text):
                yield from self._open_item("reasoning")
                self._text += text
                yield self._item_event("response.reasoning_text.delta", content_index=0, delta=text)
            case parse_events.ContentDelta(text):
                yield from self._open_item("message")
                self._text += text
                entries, self._pending = self._pending, []
                self._sent += entries
                yield self._item_event(
                    "response.output_text.delta", content_index=0, delta=text, logprobs=entries
                )
            case parse_events.ToolCallStart(_, id, name):
                yield from self._close_item()
                yield from self._open_item("function_call", call_id=id, name=name)
            case parse_events.ToolCallArgumentsDelta(_, text):
                self._text += text
                yield self._item_event("response.function_call_arguments.delta", delta=text)
            case parse_events.ToolCallEnd():
                yield from self._close_item()
            case parse_events.ToolCallDiscard():
                yield from self._close_item(status="incomplete")

    def _open_item(self, kind: str, **call: str) -> Iterator[dict[str, Any]]:
        """Open an item of this kind, unless one is open already."""
        if self._open == kind:
            return
        yield from self._close_item()
        self._open, self._text = kind, ""
        suffix = f"{self.envelope.id.removeprefix('resp_')}_{len(self._items)}"
        match kind:
            case "reasoning":
                item = _reasoning_item(f"rs_{suffix}", "", "in_progress")
            case "message":
                item = _message_item(f"msg_{suffix}", [], "in_progress")
            case _:
                item = self.envelope.function_call_item(
                    f"fc_{suffix}", call["call_id"], call["name"]
                )
        self._items.append(item)
        yield self._event(
            "response.output_item.added", output_index=len(self._items) - 1, item=item
        )
        if kind == "message":
            yield self._item_event(
                "response.content_part.added", content_index=0, part=_text_part("", [])
            )

    def _close_item(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """Close the open item, if any."""
        kind, text = self._open, self._text
        if kind is None:
            return
        item = self._items[-1]
        match kind:
            case "reasoning":
                yield self._item_event("response.reasoning_text.done", content_index=0, text=text)
                item = _reasoning_item(item["id"], text, status)
            case "message":
                self._sent += self._pending
                entries, self._sent, self._pending = self._sent, [], []
                part = _text_part(text, entries)
                yield self._item_event(
                    "response.output_text.done", content_index=0, text=text, logprobs=entries
                )
                yield self._item_event("response.content_part.done", content_index=0, part=part)
                item = _message_item(item["id"], [part], status)
            case _:
                yield self._item_event("response.function_call_arguments.done", arguments=text)
                item = item | {"arguments": text, "status": status}
        self._items[-1], self._open, self._text = item, None, ""
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _item_event(self, kind: str, **more: Any) -> dict[str, Any]:
        """An event about the open item."""
        at = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(kind, **at, **more)

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **more}
