"""vLLM /inference/v1/generate."""

import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request

from paddock.api import parse_body, vllm_generate
from paddock.http import JsonRouter, PayloadStream
from paddock.serve.chat_service import ChatService, ReturnOptions
from paddock.serve.generation import Generation


class VLLMGenerateRoutes:
    def __init__(self, service: ChatService) -> None:
        self.service = service

    def register(self, router: JsonRouter) -> None:
        router.add_route(
            "/inference/v1/generate", self.generate, body=vllm_generate.VLLMGenerateBody
        )

    async def generate(self, http: Request, value: Any) -> Any:
        body = parse_body(vllm_generate.VLLMGenerateBody, value)
        self.service.check_model(body.model)
        api_request = vllm_generate.parse_vllm_generate_request(
            body, self.service.default_sampling_params
        )
        with_prompt_logprobs = api_request.prompt_logprobs is not None
        options = ReturnOptions(
            prompt_logprobs_start=0 if with_prompt_logprobs else None,
            top_logprobs=max(api_request.top_logprobs or 0, api_request.prompt_logprobs or 0),
        )
        requests = self.service.build_requests(
            api_request, api_request.prompt, n=api_request.n, options=options
        )
        generation = self.service.new_generation(http, api_request, requests)
        if api_request.stream:
            return PayloadStream(self._payloads(generation, api_request))
        outputs = await generation.request_outputs()
        return vllm_generate.format_vllm_generate_response(
            api_request,
            list(outputs),
            id=api_request.id or outputs[0].id,
            model=self.service.settings.served_model_name,
            created=int(time.time()),
        )

    async def _payloads(
        self, generation: Generation, api_request: vllm_generate.VLLMGenerateRequest
    ) -> AsyncIterator[dict[str, Any]]:
        envelope = {"request_id": api_request.id or generation.requests[0].id}
        async with generation.stream() as deltas:
            async for i, delta in deltas:
                yield envelope | vllm_generate.format_vllm_generate_chunk(api_request, i, delta)
