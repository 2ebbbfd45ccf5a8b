"""Formatters of one completion for an API: as one response or as stream payloads.

A formatter consumes output deltas, whether they come from a local engine or a remote one.
"""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

from paddock.api import anthropic_format
from paddock.api.anthropic_format import MessageStream
from paddock.api.delta_parser import DeltaParser
from paddock.api.openai_chat_format import (
    ChatCompletionEnvelope,
    ChatCompletionStream,
    format_choice,
)
from paddock.api.openai_chat_request import ChatCompletionRequest
from paddock.api.openai_responses_format import ResponsesEnvelope, ResponseStream
from paddock.api.openai_responses_request import ResponsesRequest
from paddock.api.openai_usage import openai_usage
from paddock.api.request import ChatRequest
from paddock.api.token_decoder import TokenDecoder
from paddock.records import OutputDelta, RequestOutput

Payload = dict[str, Any]


class ResponseFormatter(Protocol):
    parser: DeltaParser

    def format_response(self, delta: OutputDelta) -> Payload:
        """The response for a completion that arrives as one final delta."""

    def start_stream(self) -> list[Payload]:
        """The first payloads of a stream."""

    def format_delta(self, delta: OutputDelta) -> list[Payload]:
        """The payloads of a delta; with the last delta also those that end the stream."""


async def stream_payloads(
    formatter: ResponseFormatter, deltas: AsyncGenerator[OutputDelta, None]
) -> AsyncGenerator[Payload, None]:
    """The payloads of a stream, starting with the first delta: an error before it can still be
    reported with a status. Closing the stream early closes `deltas`."""
    opened = False
    async with aclosing(deltas):
        async for delta in deltas:
            if not opened:
                opened = True
                for payload in formatter.start_stream():
                    yield payload
            for payload in formatter.format_delta(delta):
                yield payload


@dataclass(frozen=True, slots=True)
class FormatterContext:
    """Token decoder of the model, and the model name for requests that give none."""

    token_decoder: TokenDecoder
    name: str
    whole_calls: bool = False  # hold back tool calls until they are complete

    def new_parser(
        self, request: ChatRequest, prompt: Any, call_id: Callable[[int], str]
    ) -> DeltaParser:
        return DeltaParser(
            self.token_decoder.tokenizer,
            tools=request.tools,
            prompt=prompt,
            stops=request.sampling.stop,
            call_id=call_id,
            whole_calls=self.whole_calls,
        )

    def new_chat_envelope(
        self, request: ChatCompletionRequest, version: int
    ) -> ChatCompletionEnvelope:
        return ChatCompletionEnvelope(
            id=f"chatcmpl-{request.id or uuid4().hex}",
            model=request.model or self.name,
            created=int(time.time()),
            version=version,
        )


class ChatCompletionFormatter:
    """OpenAI Chat Completions; `index` is the number of the choice."""

    def __init__(
        self,
        context: FormatterContext,
        request: ChatCompletionRequest,
        prompt: Any,
        envelope: ChatCompletionEnvelope,
        index: int = 0,
    ) -> None:
        unique = uuid4().hex[:12]
        self.parser = context.new_parser(request, prompt, lambda i: f"call_{unique}{i}")
        self.request, self.envelope, self.index, self.token_decoder = (
            request,
            envelope,
            index,
            context.token_decoder,
        )
        self._stream = ChatCompletionStream(request, index, envelope, context.token_decoder)

    def format_choice(self, delta: OutputDelta) -> tuple[Payload, RequestOutput]:
        self.parser.feed(delta)
        assert delta.output is not None
        message = self.parser.message
        return format_choice(
            self.request, self.index, message, delta.output, self.token_decoder
        ), delta.output

    def format_response(self, delta: OutputDelta) -> Payload:
        found, output = self.format_choice(delta)
        return self.envelope.format_response([found], [output])

    def start_stream(self) -> list[Payload]:
        return [self._stream.open()]

    def format_delta(self, delta: OutputDelta) -> list[Payload]:
        found = self._stream.push(self.parser.feed(delta), delta)
        if delta.output is not None:
            calls = len(self.parser.message.tool_calls)
            found.append(self._stream.close(delta.output, calls=calls))
        return found

    def usage_chunks(self, outputs: list[RequestOutput]) -> list[Payload]:
        """The usage chunk, if the client requested it."""
        return (
            [self.envelope.chunk(usage=openai_usage(outputs))] if self.request.include_usage else []
        )


class SingleChoiceFormatter(ChatCompletionFormatter):
    """The only choice of a request; it sends the usage chunk itself."""

    def format_delta(self, delta: OutputDelta) -> list[Payload]:
        found = super().format_delta(delta)
        return found if delta.output is None else [*found, *self.usage_chunks([delta.output])]


class ResponsesFormatter:
    """OpenAI Responses."""

    def __init__(self, context: FormatterContext, request: ResponsesRequest, prompt: Any) -> None:
        unique = uuid4().hex  # unguessable: a response id grants access to the stored response
        self.parser = context.new_parser(request, prompt, lambda i: f"call_{unique[:12]}{i}")
        self._envelope = ResponsesEnvelope(
            id=f"resp_{unique}",
            model=request.model or context.name,
            created=int(time.time()),
            request=request,
            token_decoder=context.token_decoder,
        )
        self._stream = ResponseStream(self._envelope)

    def format_response(self, delta: OutputDelta) -> Payload:
        self.parser.feed(delta)
        assert delta.output is not None
        return self._envelope.format_response(self.parser.message, delta.output)

    def start_stream(self) -> list[Payload]:
        return self._stream.open()

    def format_delta(self, delta: OutputDelta) -> list[Payload]:
        found = self._stream.push(self.parser.feed(delta), delta)
        return found if delta.output is None else [*found, *self._stream.close(delta.output)]


class MessagesFormatter:
    """Anthropic Messages."""

    def __init__(self, context: FormatterContext, request: ChatRequest, prompt: Any) -> None:
        unique = uuid4().hex[:24]
        self.parser = context.new_parser(request, prompt, lambda i: f"toolu_{unique}{i}")
        self._id, self._model = f"msg_{unique}", request.model or context.name
        self._stream = MessageStream(self._id, self._model, len(prompt))

    def format_response(self, delta: OutputDelta) -> Payload:
        self.parser.feed(delta)
        assert delta.output is not None
        return anthropic_format.format_message(
            self._id, self._model, self.parser.message, delta.output
        )

    def start_stream(self) -> list[Payload]:
        return self._stream.open()

    def format_delta(self, delta: OutputDelta) -> list[Payload]:
        found = self._stream.push(self.parser.feed(delta))
        if delta.output is not None:
            calls = len(self.parser.message.tool_calls)
            found += self._stream.close(delta.output, calls=calls)
        return found
