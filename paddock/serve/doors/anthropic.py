"""Anthropic's messages and count_tokens."""

from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

from starlette.requests import Request

from paddock.api.anthropic import CountBody, MessagesBody, count, messages
from paddock.api.anthropic_reply import MessageStream, whole
from paddock.api.body import read
from paddock.api.reply import Reading
from paddock.serve.dialect import Doors, Stream
from paddock.serve.hall import Call, Hall


class Anthropic:
    def __init__(self, hall: Hall) -> None:
        self.hall = hall

    def open(self, doors: Doors) -> None:
        doors.add("/v1/messages", self.messages, body=MessagesBody)
        doors.add("/v1/messages/count_tokens", self.count, body=CountBody)

    async def count(self, _http: Request, value: Any) -> Any:
        prompt = await self.hall.prompt_of(count(read(CountBody, value), self.hall.thinking))
        return {"input_tokens": len(prompt)}

    async def messages(self, http: Request, value: Any) -> Any:
        ask = messages(read(MessagesBody, value), self.hall.defaults, self.hall.thinking)
        prompt = await self.hall.prompt_of(ask)
        call = self.hall.call(http, ask, self.hall.requests(ask, prompt))
        unique = uuid4().hex[:24]
        model = ask.model or self.hall.settings.served_name
        reading = Reading(
            self.hall.tokenizer,
            tools=ask.tools,
            prompt=prompt,
            stops=ask.sampling.stop_texts,
            call_id=lambda i: f"toolu_{unique}{i}",
        )
        if ask.stream:
            stream = MessageStream(f"msg_{unique}", model, len(prompt))
            return Stream(self._events(call, stream, reading))
        (delta,) = await call.last()
        assert delta.answer is not None
        reading.feed(delta)
        return whole(f"msg_{unique}", model, reading.message, delta.answer)

    async def _events(
        self, call: Call, stream: MessageStream, reading: Reading
    ) -> AsyncIterator[dict[str, Any]]:
        begun = False
        async with call.deltas() as deltas:
            async for _, delta in deltas:
                if not begun:
                    begun = True
                    for payload in stream.open():
                        yield payload
                for payload in stream.push(reading.feed(delta)):
                    yield payload
                if delta.answer is not None:
                    calls = len(reading.message.tool_calls)
                    for payload in stream.close(delta.answer, calls=calls):
                        yield payload
