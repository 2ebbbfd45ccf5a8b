"""OpenAI Chat Completions (`/v1/chat/completions`): responses and stream chunks."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paddock.api.openai_chat_request import ChatCompletionRequest
from paddock.api.openai_usage import openai_usage
from paddock.api.token_decoder import TokenDecoder, format_chat_logprobs
from paddock.records import Message, OutputDelta, RequestOutput, ToolCall
from paddock.text import parse_events


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCompletionEnvelope:
    """The fields that every payload of one response shares."""

    id: str
    model: str
    created: int
    version: int

    def chunk(self, *choices: dict[str, Any], **more: Any) -> dict[str, Any]:
        return self._wrap("chat.completion.chunk", choices) | more

    def format_response(
        self, choices: Sequence[dict[str, Any]], outputs: Sequence[RequestOutput]
    ) -> dict[str, Any]:
        return self._wrap("chat.completion", choices) | {"usage": openai_usage(outputs)}

    def _wrap(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"v{self.version}",
            "choices": list(choices),
        }


def format_choice(
    request: ChatCompletionRequest,
    index: int,
    message: Message,
    output: RequestOutput,
    token_decoder: TokenDecoder,
) -> dict[str, Any]:
    """One complete choice."""
    done = output.completion
    logprobs = None
    if request.top_logprobs is not None:
        top = output.top_logprobs if request.top_logprobs else ()
        logprobs = {
            "content": format_chat_logprobs(token_decoder, done.token_ids, done.logprobs, top),
            "refusal": None,
        }
    return {
        "index": index,
        "message": format_message_dict(request, message),
        "logprobs": logprobs,
        "finish_reason": openai_finish_reason(output, calls=len(message.tool_calls)),
        "matched_stop": output.matched_stop,
    }


def format_message_dict(request: ChatCompletionRequest, message: Message) -> dict[str, Any]:
    reasoning = message.reasoning if request.include_reasoning else None
    content: str | None = message.content
    if request.inline_reasoning and reasoning is not None:
        content, reasoning = f"<think>{reasoning}</think>{content}", None
    if message.tool_calls and not content:
        content = None
    return {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "reasoning": reasoning,
        "tool_calls": [format_tool_call(call) for call in message.tool_calls] or None,
    }


def format_tool_call(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def openai_finish_reason(output: RequestOutput, *, calls: int) -> str:
    finish = output.completion.finish
    return "tool_calls" if finish == "stop" and calls else finish


@dataclass(slots=True)
class ChatCompletionStream:
    """Stream chunks of one choice. Each token's log-probability is sent exactly once, with the next
    chunk, whatever text that chunk carries."""

    request: ChatCompletionRequest
    index: int
    envelope: ChatCompletionEnvelope
    token_decoder: TokenDecoder
    calls: int = 0  # started so far; an index is never reused, even if a call is discarded
    _logprobs: list[dict[str, Any]] = field(default_factory=list)
    _ids: list[int] = field(default_factory=list)
    _in_reasoning: bool = False

    def open(self) -> dict[str, Any]:
        return self._chunk({"role": "assistant", "content": ""})

    def push(
        self, events: Sequence[parse_events.ParseEvent], delta: OutputDelta
    ) -> list[dict[str, Any]]:
        if self.request.top_logprobs is not None:
            top = delta.top_logprobs if self.request.top_logprobs else ()
            self._logprobs += format_chat_logprobs(
                self.token_decoder, delta.token_ids, delta.logprobs, top
            )
        self._ids += delta.token_ids
        deltas = [found for event in events for found in self._deltas(event)]
        return [self._chunk(each) for each in deltas]

    def close(self, output: RequestOutput, *, calls: int) -> dict[str, Any]:
        """The last chunk; `calls` is the number of tool calls in the whole message."""
        last = (
            self._content("</think>")
            if self._in_reasoning and self.request.inline_reasoning
            else {}
        )
        reason = openai_finish_reason(output, calls=calls)
        return self._chunk(last, finish_reason=reason, matched_stop=output.matched_stop)

    def _deltas(self, event: parse_events.ParseEvent) -> list[dict[str, Any]]:
        if isinstance(event, parse_events.ReasoningDelta):
            return self._reasoning_deltas(event.text)
        closing = (
            [self._content("</think>")]
            if self._in_reasoning and self.request.inline_reasoning
            else []
        )
        self._in_reasoning = False
        match event:
            case parse_events.ContentDelta(text):
                return [*closing, {"content": text}]
            case parse_events.ToolCallStart(_, id, name):
                self.calls += 1
                function = {"name": name, "arguments": ""}
                return [*closing, self._call(id=id, type="function", function=function)]
            case parse_events.ToolCallArgumentsDelta(_, text):
                return [self._call(function={"arguments": text})]
        return closing

    def _reasoning_deltas(self, text: str) -> list[dict[str, Any]]:
        if not self.request.include_reasoning:
            return []
        if not self.request.inline_reasoning:
            return [{"reasoning_content": text, "reasoning": text}]
        opening = "" if self._in_reasoning else "<think>"
        self._in_reasoning = True
        return [self._content(opening + text)]

    def _content(self, text: str) -> dict[str, Any]:
        return {"content": text}

    def _call(self, **more: Any) -> dict[str, Any]:
        return {"tool_calls": [{"index": self.calls - 1, **more}]}

    def _chunk(self, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        found: dict[str, Any] = {
            "index": self.index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
            **more,
        }
        if self._logprobs:
            found["logprobs"] = {"content": self._logprobs, "refusal": None}
            self._logprobs = []
        if self.request.return_token_ids:
            found["token_ids"], self._ids = self._ids, []
        return self.envelope.chunk(found)
