"""OpenAI /v1/responses."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request

from paddock.api import formatter, openai_responses_request, parse_body
from paddock.http import JsonRouter, PayloadStream
from paddock.records import ApiError
from paddock.serve.chat_service import ChatService
from paddock.serve.response_store import ResponseStore, StoredResponse

TERMINAL_EVENTS = ("response.completed", "response.incomplete")


class ResponsesRoutes:
    def __init__(self, service: ChatService) -> None:
        self.service, settings = service, service.settings
        self.store = ResponseStore(
            max_responses=settings.max_stored_responses,
            ttl_s=settings.stored_responses_ttl_s,
            max_bytes=settings.max_stored_responses_bytes,
        )

    def register(self, router: JsonRouter) -> None:
        router.add_route("/v1/responses", self.create, body=openai_responses_request.ResponsesBody)
        router.add_route(
            "/v1/responses/input_tokens", self.count, body=openai_responses_request.ResponsesBody
        )
        router.add_route("/v1/responses/{response}", self.retrieve, methods=("GET",))
        router.add_route("/v1/responses/{response}", self.delete, methods=("DELETE",))

    async def create(self, http: Request, value: Any) -> Any:
        api_request = self._parse(value)
        prompt = await self.service.render_prompt(api_request)
        generation = self.service.new_generation(
            http, api_request, self.service.build_requests(api_request, prompt)
        )
        response_formatter = formatter.ResponsesFormatter(
            self.service.formatter_context, api_request, prompt
        )
        if api_request.stream:
            return PayloadStream(
                self._storing(
                    api_request,
                    response_formatter,
                    formatter.stream_payloads(response_formatter, generation.stream_single()),
                )
            )
        (delta,) = await generation.final_deltas()
        response = response_formatter.format_response(delta)
        self._store_response(api_request, response_formatter, response)
        return response

    async def count(self, _http: Request, value: Any) -> Any:
        prompt = await self.service.render_prompt(
            self._parse(value), max_tokens=self.service.max_tokenize_tokens
        )
        return {"object": "response.input_tokens", "input_tokens": len(prompt)}

    def _parse(self, value: Any) -> openai_responses_request.ResponsesRequest:
        body = parse_body(openai_responses_request.ResponsesBody, value)
        self.service.check_model(body.model)
        return openai_responses_request.parse_responses_request(
            body,
            self.service.default_sampling_params,
            self.service.default_thinking,
            previous=self._previous(body.previous_response_id),
            store_enabled=self.store.max_responses > 0,
        )

    async def retrieve(self, http: Request, _value: Any) -> Any:
        return self._stored(http.path_params["response"]).response

    async def delete(self, http: Request, _value: Any) -> Any:
        name = self._stored(http.path_params["response"]).response["id"]
        self.store.delete(name)
        return {"id": name, "object": "response", "deleted": True}

    # --- stored responses -------------------------------------------------------------------------

    async def _storing(
        self,
        api_request: openai_responses_request.ResponsesRequest,
        response_formatter: formatter.ResponsesFormatter,
        events: AsyncGenerator[formatter.Payload, None],
    ) -> AsyncGenerator[formatter.Payload, None]:
        async with aclosing(events):
            async for event in events:
                if event["type"] in TERMINAL_EVENTS:
                    self._store_response(api_request, response_formatter, event["response"])
                yield event

    def _store_response(
        self,
        api_request: openai_responses_request.ResponsesRequest,
        response_formatter: formatter.ResponsesFormatter,
        response: formatter.Payload,
    ) -> None:
        if api_request.store:
            messages = (*api_request.stored_messages, response_formatter.parser.message)
            self.store.put(response, messages, api_request.session)

    def _previous(self, name: str | None) -> openai_responses_request.PreviousResponse | None:
        if name is None or not self.store.max_responses:
            return None
        stored = self.store.get(name)
        if stored is None:
            raise ApiError(
                f"previous response {name!r:.80} not found: {self._retention}",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return stored.previous

    def _stored(self, name: str) -> StoredResponse:
        stored = self.store.get(name)
        if stored is None:
            raise ApiError(f"response {name!r:.80} not found: {self._retention}", status=404)
        return stored

    @property
    def _retention(self) -> str:
        if not self.store.max_responses:
            return "this server stores no responses (--max-stored-responses is 0)"
        return (
            f"the newest {self.store.max_responses} responses are stored for "
            f"{self.store.ttl_s:g} s, unless 'store' is false"
        )
