"""OpenAI's Responses."""

from typing import Any

from starlette.requests import Request

from paddock.api.body import read
from paddock.api.dialect import Doors, Stream
from paddock.api.openai_responses import ResponsesBody, respond
from paddock.api.voice import ResponsesVoice, payloads
from paddock.serve.hall import Hall


class Responses:
    def __init__(self, hall: Hall) -> None:
        self.hall = hall

    def open(self, doors: Doors) -> None:
        doors.add("/v1/responses", self.respond, body=ResponsesBody)

    async def respond(self, http: Request, value: Any) -> Any:
        ask = respond(read(ResponsesBody, value), self.hall.defaults, self.hall.thinking)
        prompt = await self.hall.prompt_of(ask)
        call = self.hall.call(http, ask, self.hall.requests(ask, prompt))
        voice = ResponsesVoice(self.hall.speaker, ask, prompt)
        if ask.stream:
            return Stream(payloads(voice, call.only()))
        (delta,) = await call.last()
        return voice.whole(delta)
