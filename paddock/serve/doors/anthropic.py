"""Anthropic's messages and count_tokens."""

from typing import Any

from starlette.requests import Request

from paddock.api.anthropic_request import (
    CountTokensBody,
    MessagesBody,
    parse_count_tokens_request,
    parse_messages_request,
)
from paddock.api.body import parse_body
from paddock.api.dialect import JsonRouter, PayloadStream
from paddock.api.formatter import MessagesFormatter, stream_payloads
from paddock.serve.hall import Hall


class Anthropic:
    def __init__(self, hall: Hall) -> None:
        self.hall = hall

    def open(self, doors: JsonRouter) -> None:
        doors.add_route("/v1/messages", self.messages, body=MessagesBody)
        doors.add_route("/v1/messages/count_tokens", self.count, body=CountTokensBody)

    async def count(self, _http: Request, value: Any) -> Any:
        body = parse_body(CountTokensBody, value)
        self.hall.refuse_unknown(body.model)
        asked = parse_count_tokens_request(body, self.hall.thinking)
        prompt = await self.hall.prompt_of(asked, most=self.hall.most_counted)
        return {"input_tokens": len(prompt)}

    async def messages(self, http: Request, value: Any) -> Any:
        body = parse_body(MessagesBody, value)
        self.hall.refuse_unknown(body.model)
        ask = parse_messages_request(body, self.hall.defaults, self.hall.thinking)
        prompt = await self.hall.prompt_of(ask)
        call = self.hall.call(http, ask, self.hall.requests(ask, prompt))
        voice = MessagesFormatter(self.hall.speaker, ask, prompt)
        if ask.stream:
            return PayloadStream(stream_payloads(voice, call.only()))
        (delta,) = await call.last()
        return voice.format_response(delta)
