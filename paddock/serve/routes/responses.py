"""OpenAI's Responses."""

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
    def __init__(self, hall: ChatService) -> None:
        self.hall, settings = hall, hall.settings
        self.kept = ResponseStore(
            most=settings.max_stored_responses,
            seconds=settings.stored_responses_ttl_s,
            most_bytes=settings.max_stored_responses_bytes,
        )

    def register(self, doors: JsonRouter) -> None:
        doors.add_route("/v1/responses", self.create, body=openai_responses_request.ResponsesBody)
        doors.add_route(
            "/v1/responses/input_tokens", self.count, body=openai_responses_request.ResponsesBody
        )
        doors.add_route("/v1/responses/{response}", self.retrieve, methods=("GET",))
        doors.add_route("/v1/responses/{response}", self.delete, methods=("DELETE",))

    async def create(self, http: Request, value: Any) -> Any:
        ask = self._asked(value)
        prompt = await self.hall.render_prompt(ask)
        call = self.hall.new_generation(http, ask, self.hall.build_requests(ask, prompt))
        voice = formatter.ResponsesFormatter(self.hall.speaker, ask, prompt)
        if ask.stream:
            return PayloadStream(
                self._keeping(ask, voice, formatter.stream_payloads(voice, call.stream_single()))
            )
        (delta,) = await call.final_deltas()
        response = voice.format_response(delta)
        self._keep(ask, voice, response)
        return response

    async def count(self, _http: Request, value: Any) -> Any:
        prompt = await self.hall.render_prompt(
            self._asked(value), most=self.hall.max_tokenize_tokens
        )
        return {"object": "response.input_tokens", "input_tokens": len(prompt)}

    def _asked(self, value: Any) -> openai_responses_request.ResponsesRequest:
        body = parse_body(openai_responses_request.ResponsesBody, value)
        self.hall.check_model(body.model)
        return openai_responses_request.parse_responses_request(
            body,
            self.hall.default_sampling_params,
            self.hall.default_thinking,
            previous=self._previous(body.previous_response_id),
            keeps=self.kept.most > 0,
        )

    async def retrieve(self, http: Request, _value: Any) -> Any:
        return self._found(http.path_params["response"]).response

    async def delete(self, http: Request, _value: Any) -> Any:
        name = self._found(http.path_params["response"]).response["id"]
        self.kept.delete(name)
        return {"id": name, "object": "response", "deleted": True}

    # --- what is kept -----------------------------------------------------------------------------

    async def _keeping(
        self,
        ask: openai_responses_request.ResponsesRequest,
        voice: formatter.ResponsesFormatter,
        events: AsyncGenerator[formatter.Payload, None],
    ) -> AsyncGenerator[formatter.Payload, None]:
        async with aclosing(events):
            async for event in events:
                if event["type"] in TERMINAL_EVENTS:
                    self._keep(ask, voice, event["response"])
                yield event

    def _keep(
        self,
        ask: openai_responses_request.ResponsesRequest,
        voice: formatter.ResponsesFormatter,
        response: formatter.Payload,
    ) -> None:
        if ask.store:
            messages = (*ask.stored_messages, voice.reading.message)
            self.kept.put(response, messages, ask.session)

    def _previous(self, name: str | None) -> openai_responses_request.PreviousResponse | None:
        if name is None or not self.kept.most:
            return None
        kept = self.kept.get(name)
        if kept is None:
            raise ApiError(
                f"previous response {name!r:.80} not found: {self._rule}",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return kept.previous

    def _found(self, name: str) -> StoredResponse:
        kept = self.kept.get(name)
        if kept is None:
            raise ApiError(f"response {name!r:.80} not found: {self._rule}", status=404)
        return kept

    @property
    def _rule(self) -> str:
        if not self.kept.most:
            return "this server keeps no responses (--keep-responses)"
        return (
            f"the newest {self.kept.most} responses are kept for {self.kept.seconds:g} s, "
            "unless 'store' is false"
        )
