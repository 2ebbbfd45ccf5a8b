"""OpenAI's Responses."""

import time
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

from starlette.requests import Request

from paddock.api.body import read
from paddock.api.openai_responses import ResponsesBody, respond
from paddock.api.openai_responses_reply import ResponseFrame, ResponseStream
from paddock.api.reply import Reading
from paddock.serve.dialect import Doors, Stream
from paddock.serve.hall import Call, Hall


class Responses:
    def __init__(self, hall: Hall) -> None:
        self.hall = hall

    def open(self, doors: Doors) -> None:
        doors.add("/v1/responses", self.respond, body=ResponsesBody)

    async def respond(self, http: Request, value: Any) -> Any:
        ask = respond(read(ResponsesBody, value), self.hall.defaults, self.hall.thinking)
        prompt = await self.hall.prompt_of(ask)
        call = self.hall.call(http, ask, self.hall.requests(ask, prompt))
        unique = uuid4().hex
        frame = ResponseFrame(
            id=f"resp_{unique}",
            model=ask.model or self.hall.settings.served_name,
            created=int(time.time()),
            ask=ask,
            spelling=self.hall.spelling,
        )
        reading = Reading(
            self.hall.tokenizer,
            tools=ask.tools,
            prompt=prompt,
            stops=(),
            call_id=lambda i: f"call_{unique[:12]}{i}",
        )
        if ask.stream:
            return Stream(self._events(call, ResponseStream(frame), reading))
        (delta,) = await call.last()
        assert delta.answer is not None
        reading.feed(delta)
        return frame.whole(reading.message, delta.answer)

    async def _events(
        self, call: Call, stream: ResponseStream, reading: Reading
    ) -> AsyncIterator[dict[str, Any]]:
        begun = False
        async with call.deltas() as deltas:
            async for _, delta in deltas:
                if not begun:
                    begun = True
                    for payload in stream.open():
                        yield payload
                for payload in stream.push(reading.feed(delta), delta):
                    yield payload
                if delta.answer is not None:
                    for payload in stream.close(delta.answer):
                        yield payload
