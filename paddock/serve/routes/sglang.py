"""SGLang's /generate."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

from starlette.requests import Request

from paddock.api import parse_body, sglang_format, sglang_request
from paddock.engine import Request as EngineRequest
from paddock.engine import RequestOutput
from paddock.http import JsonRouter, PayloadStream
from paddock.records import ApiError
from paddock.serve.chat_service import ChatService, Generation, ReturnOptions


class SGLangRoutes:
    def __init__(self, hall: ChatService) -> None:
        self.hall = hall

    def register(self, doors: JsonRouter) -> None:
        doors.add_route(
            "/generate", self.generate, body=sglang_request.GenerateBody, methods=("POST", "PUT")
        )

    async def generate(self, http: Request, value: Any) -> Any:
        body = parse_body(sglang_request.GenerateBody, value)
        asks, many = sglang_request.parse_generate_requests(body, most=self.hall.max_requests)
        asks = [replace(ask, id=ask.id or uuid4().hex) for ask in asks]
        if not asks:
            raise ApiError("input_ids: there are no prompts", param="input_ids")
        prompts = [await self.hall.tokenize_prompt(ask.prompt) for ask in asks]
        requests = [self._requests(ask, p) for ask, p in zip(asks, prompts, strict=True)]
        call = self.hall.new_generation(
            http, asks[0], [each for group in requests for each in group]
        )
        forms = [
            sglang_format.GenerateFormatter(
                replace(ask, id=request.id),
                prompt,
                self.hall.tokenizer,
                self.hall.spelling,
                call.replica,
                self.hall.labels.label_of,
            )
            for ask, prompt, group in zip(asks, prompts, requests, strict=True)
            for request in group
        ]
        if asks[0].stream:
            return PayloadStream(self._payloads(call, forms, many or len(forms) > 1))
        answers: list[RequestOutput] = await call.request_outputs()
        found = [form.format_response(answer) for form, answer in zip(forms, answers, strict=True)]
        return found if many or len(forms) > 1 else found[0]

    def _requests(
        self, ask: sglang_request.GenerateRequest, prompt: tuple[int, ...]
    ) -> list[EngineRequest]:
        extras = ReturnOptions(
            prompt_logprobs_from=ask.prompt_logprobs_from,
            ask_ids=ask.ask_ids,
            replay=ask.indexer or ask.experts_from is not None,
        )
        return self.hall.build_requests(ask, prompt, n=ask.n, extras=extras)

    async def _payloads(
        self, call: Generation, forms: list[sglang_format.GenerateFormatter], many: bool
    ) -> AsyncIterator[dict[str, Any]]:
        incremental = self.hall.settings.incremental_streaming_output
        streams = [sglang_format.GenerateStream(form, incremental=incremental) for form in forms]
        async with call.stream() as deltas:
            async for i, delta in deltas:
                payload = streams[i].push(delta)
                if payload is not None:
                    yield payload | {"index": i} if many else payload
