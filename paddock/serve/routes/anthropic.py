"""Anthropic /v1/messages and /v1/messages/count_tokens."""

from typing import Any

from starlette.requests import Request

from paddock.api import anthropic_request, formatter, parse_body
from paddock.http import JsonRouter, PayloadStream
from paddock.serve.chat_service import ChatService


class AnthropicRoutes:
    def __init__(self, service: ChatService) -> None:
        self.service = service

    def register(self, router: JsonRouter) -> None:
        router.add_route("/v1/messages", self.messages, body=anthropic_request.MessagesBody)
        router.add_route(
            "/v1/messages/count_tokens", self.count_tokens, body=anthropic_request.CountTokensBody
        )

    async def count_tokens(self, _http: Request, value: Any) -> Any:
        body = parse_body(anthropic_request.CountTokensBody, value)
        self.service.check_model(body.model)
        request = anthropic_request.parse_count_tokens_request(body, self.service.default_thinking)
        prompt = await self.service.render_prompt(
            request, max_tokens=self.service.max_tokenize_tokens
        )
        return {"input_tokens": len(prompt)}

    async def messages(self, http: Request, value: Any) -> Any:
        body = parse_body(anthropic_request.MessagesBody, value)
        self.service.check_model(body.model)
        api_request = anthropic_request.parse_messages_request(
            body, self.service.default_sampling_params, self.service.default_thinking
        )
        prompt = await self.service.render_prompt(api_request)
        generation = self.service.new_generation(
            http, api_request, self.service.build_requests(api_request, prompt)
        )
        message_formatter = formatter.MessagesFormatter(
            self.service.formatter_context, api_request, prompt
        )
        if api_request.stream:
            return PayloadStream(
                formatter.stream_payloads(message_formatter, generation.stream_single())
            )
        (delta,) = await generation.final_deltas()
        return message_formatter.format_response(delta)
