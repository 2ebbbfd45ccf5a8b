"""SGLang /generate."""

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
from paddock.serve.chat_service import ChatService, ReturnOptions
from paddock.serve.generation import Generation


class SGLangRoutes:
    def __init__(self, service: ChatService) -> None:
        self.service = service

    def register(self, router: JsonRouter) -> None:
        router.add_route(
            "/generate", self.generate, body=sglang_request.GenerateBody, methods=("POST", "PUT")
        )

    async def generate(self, http: Request, value: Any) -> Any:
        body = parse_body(sglang_request.GenerateBody, value)
        api_requests, batched = sglang_request.parse_generate_requests(
            body, max_completions=self.service.max_requests
        )
        api_requests = [
            replace(api_request, id=api_request.id or uuid4().hex) for api_request in api_requests
        ]
        if not api_requests:
            raise ApiError("input_ids must not be empty", param="input_ids")
        prompts = [
            await self.service.tokenize_prompt(api_request.prompt) for api_request in api_requests
        ]
        requests = [
            self._engine_requests(api_request, p)
            for api_request, p in zip(api_requests, prompts, strict=True)
        ]
        generation = self.service.new_generation(
            http, api_requests[0], [each for group in requests for each in group]
        )
        formatters = [
            sglang_format.GenerateFormatter(
                replace(api_request, id=request.id),
                prompt,
                self.service.tokenizer,
                self.service.token_decoder,
                generation.replica,
                self.service.labels.label_of,
            )
            for api_request, prompt, group in zip(api_requests, prompts, requests, strict=True)
            for request in group
        ]
        if api_requests[0].stream:
            return PayloadStream(
                self._payloads(generation, formatters, batched or len(formatters) > 1)
            )
        outputs: list[RequestOutput] = await generation.request_outputs()
        responses = [
            response_formatter.format_response(output)
            for response_formatter, output in zip(formatters, outputs, strict=True)
        ]
        return responses if batched or len(formatters) > 1 else responses[0]

    def _engine_requests(
        self, api_request: sglang_request.GenerateRequest, prompt: tuple[int, ...]
    ) -> list[EngineRequest]:
        options = ReturnOptions(
            prompt_logprobs_start=api_request.prompt_logprobs_start,
            logprob_token_ids=api_request.logprob_token_ids,
            return_routing=api_request.return_indexer_topk
            or api_request.routed_experts_start is not None,
        )
        return self.service.build_requests(api_request, prompt, n=api_request.n, options=options)

    async def _payloads(
        self,
        generation: Generation,
        formatters: list[sglang_format.GenerateFormatter],
        batched: bool,
    ) -> AsyncIterator[dict[str, Any]]:
        incremental = self.service.settings.incremental_streaming_output
        streams = [
            sglang_format.GenerateStream(response_formatter, incremental=incremental)
            for response_formatter in formatters
        ]
        async with generation.stream() as deltas:
            async for i, delta in deltas:
                payload = streams[i].push(delta)
                if payload is not None:
                    yield payload | {"index": i} if batched else payload
