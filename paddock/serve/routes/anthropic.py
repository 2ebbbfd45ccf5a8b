"""Anthropic's messages and count_tokens."""

from typing import Any

from starlette.requests import Request

from paddock.api import anthropic_request, formatter, parse_body
from paddock.http import JsonRouter, PayloadStream
from paddock.serve.chat_service import ChatService


class AnthropicRoutes:
    def __init__(self, hall: ChatService) -> None:
        self.hall = hall

    def register(self, doors: JsonRouter) -> None:
        doors.add_route("/v1/messages", self.messages, body=anthropic_request.MessagesBody)
        doors.add_route(
            "/v1/messages/count_tokens", self.count, body=anthropic_request.CountTokensBody
        )

    async def count(self, _http: Request, value: Any) -> Any:
        body = parse_body(anthropic_request.CountTokensBody, value)
        self.hall.check_model(body.model)
        asked = anthropic_request.parse_count_tokens_request(body, self.hall.default_thinking)
        prompt = await self.hall.render_prompt(asked, most=self.hall.max_tokenize_tokens)
        return {"input_tokens": len(prompt)}

    async def messages(self, http: Request, value: Any) -> Any:
        body = parse_body(anthropic_request.MessagesBody, value)
        self.hall.check_model(body.model)
        ask = anthropic_request.parse_messages_request(
            body, self.hall.default_sampling_params, self.hall.default_thinking
        )
        prompt = await self.hall.render_prompt(ask)
        call = self.hall.new_generation(http, ask, self.hall.build_requests(ask, prompt))
        voice = formatter.MessagesFormatter(self.hall.speaker, ask, prompt)
        if ask.stream:
            return PayloadStream(formatter.stream_payloads(voice, call.stream_single()))
        (delta,) = await call.final_deltas()
        return voice.format_response(delta)
