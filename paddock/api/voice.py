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

from paddock.api import anthropic_reply
from paddock.api.anthropic_reply import MessageStream
from paddock.api.ask import Talk
from paddock.api.openai_chat import Chat
from paddock.api.openai_chat_reply import ChatStream, Frame, choice
from paddock.api.openai_responses import Respond
from paddock.api.openai_responses_reply import ResponseFrame, ResponseStream
from paddock.api.openai_usage import usage
from paddock.api.reply import Answer, Delta, Reading
from paddock.api.spelling import Spelling

Payload = dict[str, Any]


class Voice(Protocol):
    reading: Reading

    def whole(self, delta: Delta) -> Payload:
        """The reply that came in one piece."""

    def open(self) -> list[Payload]:
        """What a stream begins with."""

    def say(self, delta: Delta) -> list[Payload]:
        """What is new; with the last delta, what a stream ends with."""


async def payloads(
    voice: Voice, deltas: AsyncGenerator[Delta, None]
) -> AsyncGenerator[Payload, None]:
    """A stream, from its first delta on: what goes wrong before that is no stream yet. Closing it
    early closes `deltas`."""
    opened = False
    async with aclosing(deltas):
        async for delta in deltas:
            if not opened:
                opened = True
                for payload in voice.open():
                    yield payload
            for payload in voice.say(delta):
                yield payload


@dataclass(frozen=True, slots=True)
class Speaker:
    """Who speaks: the model's tokens, and its name where the client says none."""

    spelling: Spelling
    name: str
    whole_calls: bool = False  # nothing is told of a call before it is known to be one

    def reading(self, ask: Talk, prompt: Any, call_id: Callable[[int], str]) -> Reading:
        return Reading(
            self.spelling.tokenizer,
            tools=ask.tools,
            prompt=prompt,
            stops=ask.sampling.stop,
            call_id=call_id,
            whole_calls=self.whole_calls,
        )

    def chat_frame(self, ask: Chat, version: int) -> Frame:
        return Frame(
            id=f"chatcmpl-{ask.id or uuid4().hex}",
            model=ask.model or self.name,
            created=int(time.time()),
            version=version,
        )


class ChatVoice:
    """OpenAI's chat completions; `index` counts the replies to one request."""

    def __init__(
        self, speaker: Speaker, ask: Chat, prompt: Any, frame: Frame, index: int = 0
    ) -> None:
        unique = uuid4().hex[:12]
        self.reading = speaker.reading(ask, prompt, lambda i: f"call_{unique}{i}")
        self.ask, self.frame, self.index, self.spelling = ask, frame, index, speaker.spelling
        self._stream = ChatStream(ask, index, frame, speaker.spelling)

    def choice(self, delta: Delta) -> tuple[Payload, Answer]:
        self.reading.feed(delta)
        assert delta.answer is not None
        message = self.reading.message
        return choice(self.ask, self.index, message, delta.answer, self.spelling), delta.answer

    def whole(self, delta: Delta) -> Payload:
        found, answer = self.choice(delta)
        return self.frame.whole([found], [answer])

    def open(self) -> list[Payload]:
        return [self._stream.open()]

    def say(self, delta: Delta) -> list[Payload]:
        found = self._stream.push(self.reading.feed(delta), delta)
        if delta.answer is not None:
            calls = len(self.reading.message.tool_calls)
            found.append(self._stream.close(delta.answer, calls=calls))
        return found

    def usage(self, answers: list[Answer]) -> list[Payload]:
        """What a stream ends with if the client wants to know."""
        return [self.frame.chunk(usage=usage(answers))] if self.ask.shows_usage else []


class OneChatVoice(ChatVoice):
    """The only reply to a request, which therefore ends the stream itself."""

    def say(self, delta: Delta) -> list[Payload]:
        found = super().say(delta)
        return found if delta.answer is None else [*found, *self.usage([delta.answer])]


class ResponsesVoice:
    """OpenAI's Responses."""

    def __init__(self, speaker: Speaker, ask: Respond, prompt: Any) -> None:
        unique = uuid4().hex  # nobody who was not told it can guess it
        self.reading = speaker.reading(ask, prompt, lambda i: f"call_{unique[:12]}{i}")
        self._frame = ResponseFrame(
            id=f"resp_{unique}",
            model=ask.model or speaker.name,
            created=int(time.time()),
            ask=ask,
            spelling=speaker.spelling,
        )
        self._stream = ResponseStream(self._frame)

    def whole(self, delta: Delta) -> Payload:
        self.reading.feed(delta)
        assert delta.answer is not None
        return self._frame.whole(self.reading.message, delta.answer)

    def open(self) -> list[Payload]:
        return self._stream.open()

    def say(self, delta: Delta) -> list[Payload]:
        found = self._stream.push(self.reading.feed(delta), delta)
        return found if delta.answer is None else [*found, *self._stream.close(delta.answer)]


class MessagesVoice:
    """Anthropic's messages."""

    def __init__(self, speaker: Speaker, ask: Talk, prompt: Any) -> None:
        unique = uuid4().hex[:24]
        self.reading = speaker.reading(ask, prompt, lambda i: f"toolu_{unique}{i}")
        self._id, self._model = f"msg_{unique}", ask.model or speaker.name
        self._stream = MessageStream(self._id, self._model, len(prompt))

    def whole(self, delta: Delta) -> Payload:
        self.reading.feed(delta)
        assert delta.answer is not None
        return anthropic_reply.whole(self._id, self._model, self.reading.message, delta.answer)

    def open(self) -> list[Payload]:
        return self._stream.open()

    def say(self, delta: Delta) -> list[Payload]:
        found = self._stream.push(self.reading.feed(delta))
        if delta.answer is not None:
            calls = len(self.reading.message.tool_calls)
            found += self._stream.close(delta.answer, calls=calls)
        return found
