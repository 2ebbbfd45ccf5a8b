"""One reply, told in a dialect: whole, or as it comes.

A `Voice` reads the reply and says it. Whoever has deltas, from an engine here or far away, has
every dialect.
"""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

from paddock.api import anthropic_format
from paddock.api.anthropic_format import MessageStream
from paddock.api.delta_parser import DeltaParser, OutputDeltaLike, RequestOutputLike
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

Payload = dict[str, Any]


class ResponseFormatter(Protocol):
    reading: DeltaParser

    def format_response(self, delta: OutputDeltaLike) -> Payload:
        """The reply that came in one piece."""

    def start_stream(self) -> list[Payload]:
        """What a stream begins with."""

    def format_delta(self, delta: OutputDeltaLike) -> list[Payload]:
        """What is new; with the last delta, what a stream ends with."""


async def stream_payloads(
    voice: ResponseFormatter, deltas: AsyncGenerator[OutputDeltaLike, None]
) -> AsyncGenerator[Payload, None]:
    """A stream, from its first delta on: what goes wrong before that is no stream yet. Closing it
    early closes `deltas`."""
    opened = False
    async with aclosing(deltas):
        async for delta in deltas:
            if not opened:
                opened = True
                for payload in voice.start_stream():
                    yield payload
            for payload in voice.format_delta(delta):
                yield payload


@dataclass(frozen=True, slots=True)
class FormatterContext:
    """Who speaks: the model's tokens, and its name where the client says none."""

    spelling: TokenDecoder
    name: str
    whole_calls: bool = False  # nothing is told of a call before it is known to be one

    def new_parser(
        self, ask: ChatRequest, prompt: Any, call_id: Callable[[int], str]
    ) -> DeltaParser:
        return DeltaParser(
            self.spelling.tokenizer,
            tools=ask.tools,
            prompt=prompt,
            stops=ask.sampling.stop,
            call_id=call_id,
            whole_calls=self.whole_calls,
        )

    def new_chat_envelope(self, ask: ChatCompletionRequest, version: int) -> ChatCompletionEnvelope:
        return ChatCompletionEnvelope(
            id=f"chatcmpl-{ask.id or uuid4().hex}",
            model=ask.model or self.name,
            created=int(time.time()),
            version=version,
        )


class ChatCompletionFormatter:
    """OpenAI's chat completions; `index` counts the replies to one request."""

    def __init__(
        self,
        speaker: FormatterContext,
        ask: ChatCompletionRequest,
        prompt: Any,
        frame: ChatCompletionEnvelope,
        index: int = 0,
    ) -> None:
        unique = uuid4().hex[:12]
        self.reading = speaker.new_parser(ask, prompt, lambda i: f"call_{unique}{i}")
        self.ask, self.frame, self.index, self.spelling = ask, frame, index, speaker.spelling
        self._stream = ChatCompletionStream(ask, index, frame, speaker.spelling)

    def format_choice(self, delta: OutputDeltaLike) -> tuple[Payload, RequestOutputLike]:
        self.reading.feed(delta)
        assert delta.output is not None
        message = self.reading.message
        return format_choice(
            self.ask, self.index, message, delta.output, self.spelling
        ), delta.output

    def format_response(self, delta: OutputDeltaLike) -> Payload:
        found, answer = self.format_choice(delta)
        return self.frame.format_response([found], [answer])

    def start_stream(self) -> list[Payload]:
        return [self._stream.open()]

    def format_delta(self, delta: OutputDeltaLike) -> list[Payload]:
        found = self._stream.push(self.reading.feed(delta), delta)
        if delta.output is not None:
            calls = len(self.reading.message.tool_calls)
            found.append(self._stream.close(delta.output, calls=calls))
        return found

    def usage_chunks(self, answers: list[RequestOutputLike]) -> list[Payload]:
        """What a stream ends with if the client wants to know."""
        return [self.frame.chunk(usage=openai_usage(answers))] if self.ask.shows_usage else []


class SingleChoiceFormatter(ChatCompletionFormatter):
    """The only reply to a request, which therefore ends the stream itself."""

    def format_delta(self, delta: OutputDeltaLike) -> list[Payload]:
        found = super().format_delta(delta)
        return found if delta.output is None else [*found, *self.usage_chunks([delta.output])]


class ResponsesFormatter:
    """OpenAI's Responses."""

    def __init__(self, speaker: FormatterContext, ask: ResponsesRequest, prompt: Any) -> None:
        unique = uuid4().hex  # nobody who was not told it can guess it
        self.reading = speaker.new_parser(ask, prompt, lambda i: f"call_{unique[:12]}{i}")
        self._frame = ResponsesEnvelope(
            id=f"resp_{unique}",
            model=ask.model or speaker.name,
            created=int(time.time()),
            ask=ask,
            spelling=speaker.spelling,
        )
        self._stream = ResponseStream(self._frame)

    def format_response(self, delta: OutputDeltaLike) -> Payload:
        self.reading.feed(delta)
        assert delta.output is not None
        return self._frame.format_response(self.reading.message, delta.output)

    def start_stream(self) -> list[Payload]:
        return self._stream.open()

    def format_delta(self, delta: OutputDeltaLike) -> list[Payload]:
        found = self._stream.push(self.reading.feed(delta), delta)
        return found if delta.output is None else [*found, *self._stream.close(delta.output)]


class MessagesFormatter:
    """Anthropic's messages."""

    def __init__(self, speaker: FormatterContext, ask: ChatRequest, prompt: Any) -> None:
        unique = uuid4().hex[:24]
        self.reading = speaker.new_parser(ask, prompt, lambda i: f"toolu_{unique}{i}")
        self._id, self._model = f"msg_{unique}", ask.model or speaker.name
        self._stream = MessageStream(self._id, self._model, len(prompt))

    def format_response(self, delta: OutputDeltaLike) -> Payload:
        self.reading.feed(delta)
        assert delta.output is not None
        return anthropic_format.format_message(
            self._id, self._model, self.reading.message, delta.output
        )

    def start_stream(self) -> list[Payload]:
        return self._stream.open()

    def format_delta(self, delta: OutputDeltaLike) -> list[Payload]:
        found = self._stream.push(self.reading.feed(delta))
        if delta.output is not None:
            calls = len(self.reading.message.tool_calls)
            found += self._stream.close(delta.output, calls=calls)
        return found
