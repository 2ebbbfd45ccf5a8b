"""Anthropic's messages and count_tokens."""

from typing import Any

from starlette.requests import Request

from paddock.api.anthropic import CountBody, MessagesBody, count, messages
from paddock.api.body import read
from paddock.api.dialect import Doors, Stream
from paddock.api.voice import MessagesVoice, payloads
from paddock.serve.hall import Hall


class Anthropic:
    def __init__(self, hall: Hall) -> None:
        self.hall = hall

    def open(self, doors: Doors) -> None:
        doors.add("/v1/messages", self.messages, body=MessagesBody)
        doors.add("/v1/messages/count_tokens", self.count, body=CountBody)

    async def count(self, _http: Request, value: Any) -> Any:
        body = read(CountBody, value)
        self.hall.refuse_unknown(body.model)
        asked = count(body, self.hall.thinking)
        prompt = await self.hall.prompt_of(asked, most=self.hall.most_counted)
        return {"input_tokens": len(prompt)}

    async def messages(self, http: Request, value: Any) -> Any:
        body = read(MessagesBody, value)
        self.hall.refuse_unknown(body.model)
        ask = messages(body, self.hall.defaults, self.hall.thinking)
        prompt = await self.hall.prompt_of(ask)
        call = self.hall.call(http, ask, self.hall.requests(ask, prompt))
        voice = MessagesVoice(self.hall.speaker, ask, prompt)
        if ask.stream:
            return Stream(payloads(voice, call.only()))
        (delta,) = await call.last()
        return voice.whole(delta)
