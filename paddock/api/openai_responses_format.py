"""OpenAI's `/v1/responses`: how it answers.

A reply is a list of items: thoughts, a message, calls. A stream tells of each item that it begins,
grows and ends; the last event holds them all.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from paddock.api.delta_parser import OutputDeltaLike, RequestOutputLike
from paddock.api.openai_responses_request import ResponsesRequest
from paddock.api.token_decoder import TokenDecoder, format_chat_logprobs
from paddock.records import Message
from paddock.text import parse_events

ResponseItem = dict[str, Any]


def responses_usage(answer: RequestOutputLike) -> dict[str, Any]:
    written = len(answer.completion.token_ids)
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": answer.prompt_tokens + written,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesEnvelope:
    """What stands around the items."""

    id: str
    model: str
    created: int
    ask: ResponsesRequest
    spelling: TokenDecoder

    def response_object(
        self, items: Sequence[ResponseItem], answer: RequestOutputLike | None
    ) -> dict[str, Any]:
        """The response object; `answer` is None while it is being written."""
        status, incomplete = "in_progress", None
        if answer is not None:
            cut = answer.completion.finish == "length"
            incomplete = {"reason": "max_output_tokens"} if cut else None
            status = "incomplete" if cut else "completed"
            if answer.completion.finish == "abort":
                status = "cancelled"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model,
            "output": list(items),
            "usage": None if answer is None else responses_usage(answer),
            "error": None,
            "incomplete_details": incomplete,
            **self.ask.echoed,
        }

    def format_response(self, message: Message, answer: RequestOutputLike) -> dict[str, Any]:
        items: list[ResponseItem] = []
        suffix = self.id.removeprefix("resp_")
        if message.reasoning:
            items.append(_thought(f"rs_{suffix}_{len(items)}", message.reasoning, "completed"))
        if message.content or not (items or message.tool_calls):
            entries: list[dict[str, Any]] = []
            if self.ask.top_logprobs is not None:
                done, top = answer.completion, answer.top_logprobs if self.ask.top_logprobs else ()
                entries = format_chat_logprobs(self.spelling, done.token_ids, done.logprobs, top)
            part = _text_part(message.content, entries)
            items.append(_message(f"msg_{suffix}_{len(items)}", [part], "completed"))
        for call in message.tool_calls:
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            items.append(_call(f"fc_{suffix}_{len(items)}", call.id, call.name, arguments))
        return self.response_object(items, answer)


def _thought(id: str, text: str, status: str) -> ResponseItem:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": id, "type": "reasoning", "summary": [], "content": content, "status": status}


def _message(id: str, content: list[dict[str, Any]], status: str) -> ResponseItem:
    return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}


def _call(
    id: str, call_id: str, name: str, arguments: str, status: str = "completed"
) -> ResponseItem:
    return {
        "id": id,
        "type": "function_call",
        "status": status,
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


@dataclass(slots=True)
class ResponseStream:
    """One reply, event by event. Log-probabilities go with the next text that is sent; those of
    tokens after the last text go with the end of the message."""

    frame: ResponsesEnvelope
    _number: int = 0
    _items: list[ResponseItem] = field(default_factory=list)
    _open: str | None = None  # the type of the item being written
    _text: str = ""
    _pending: list[dict[str, Any]] = field(default_factory=list)
    _sent: list[dict[str, Any]] = field(default_factory=list)

    def open(self) -> list[dict[str, Any]]:
        response = self.frame.response_object([], None)
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def push(
        self, events: Sequence[parse_events.ParseEvent], delta: OutputDeltaLike
    ) -> list[dict[str, Any]]:
        ask = self.frame.ask
        if ask.top_logprobs is not None:
            top = delta.top_logprobs if ask.top_logprobs else ()
            self._pending += format_chat_logprobs(
                self.frame.spelling, delta.token_ids, delta.logprobs, top
            )
        return [payload for event in events for payload in self._payloads(event)]

    def close(self, answer: RequestOutputLike) -> list[dict[str, Any]]:
        found = list(self._shut())
        if not self._items:
            found += [*self._begin("message"), *self._shut()]
        response = self.frame.response_object(self._items, answer)
        kind = "incomplete" if response["status"] == "incomplete" else "completed"
        return [*found, self._event(f"response.{kind}", response=response)]

    def _payloads(self, event: parse_events.ParseEvent) -> Iterator[dict[str, Any]]:
        match event:
            case parse_events.ReasoningDelta(text):
                yield from self._begin("reasoning")
                self._text += text
                yield self._at("response.reasoning_text.delta", content_index=0, delta=text)
            case parse_events.ContentDelta(text):
                yield from self._begin("message")
                self._text += text
                entries, self._pending = self._pending, []
                self._sent += entries
                yield self._at(
                    "response.output_text.delta", content_index=0, delta=text, logprobs=entries
                )
            case parse_events.ToolCallStart(_, id, name):
                yield from self._shut()
                yield from self._begin("function_call", call_id=id, name=name)
            case parse_events.ToolCallArgumentsDelta(_, text):
                self._text += text
                yield self._at("response.function_call_arguments.delta", delta=text)
            case parse_events.ToolCallEnd():
                yield from self._shut()
            case parse_events.ToolCallDiscard():
                yield from self._shut(status="incomplete")

    def _begin(self, kind: str, **call: str) -> Iterator[dict[str, Any]]:
        """Begin an item, unless one of this kind is being written."""
        if self._open == kind:
            return
        yield from self._shut()
        self._open, self._text = kind, ""
        suffix = f"{self.frame.id.removeprefix('resp_')}_{len(self._items)}"
        match kind:
            case "reasoning":
                item = _thought(f"rs_{suffix}", "", "in_progress")
            case "message":
                item = _message(f"msg_{suffix}", [], "in_progress")
            case _:
                item = _call(f"fc_{suffix}", call["call_id"], call["name"], "", "in_progress")
        self._items.append(item)
        yield self._event(
            "response.output_item.added", output_index=len(self._items) - 1, item=item
        )
        if kind == "message":
            yield self._at("response.content_part.added", content_index=0, part=_text_part("", []))

    def _shut(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """End the item being written, if one is."""
        kind, text = self._open, self._text
        if kind is None:
            return
        item = self._items[-1]
        match kind:
            case "reasoning":
                yield self._at("response.reasoning_text.done", content_index=0, text=text)
                item = _thought(item["id"], text, status)
            case "message":
                self._sent += self._pending
                entries, self._sent, self._pending = self._sent, [], []
                part = _text_part(text, entries)
                yield self._at(
                    "response.output_text.done", content_index=0, text=text, logprobs=entries
                )
                yield self._at("response.content_part.done", content_index=0, part=part)
                item = _message(item["id"], [part], status)
            case _:
                yield self._at("response.function_call_arguments.done", arguments=text)
                item = _call(item["id"], item["call_id"], item["name"], text, status)
        self._items[-1], self._open, self._text = item, None, ""
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _at(self, kind: str, **more: Any) -> dict[str, Any]:
        """An event about the item being written."""
        at = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(kind, **at, **more)

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **more}
