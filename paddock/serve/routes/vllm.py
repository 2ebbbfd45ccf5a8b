"""vLLM's tokens in, tokens out."""

import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request

from paddock.api import parse_body, vllm_generate
from paddock.http import JsonRouter, PayloadStream
from paddock.serve.chat_service import ChatService, Generation, ReturnOptions


class VLLMGenerateRoutes:
    def __init__(self, hall: ChatService) -> None:
        self.hall = hall

    def register(self, doors: JsonRouter) -> None:
        doors.add_route(
            "/inference/v1/generate", self.generate, body=vllm_generate.VLLMGenerateBody
        )

    async def generate(self, http: Request, value: Any) -> Any:
        body = parse_body(vllm_generate.VLLMGenerateBody, value)
        self.hall.check_model(body.model)
        ask = vllm_generate.parse_vllm_generate_request(body, self.hall.default_sampling_params)
        scored = ask.prompt_logprobs is not None
        extras = ReturnOptions(
            prompt_logprobs_from=0 if scored else None,
            top_logprobs=max(ask.top_logprobs or 0, ask.prompt_logprobs or 0),
        )
        requests = self.hall.build_requests(ask, ask.prompt, n=ask.n, extras=extras)
        call = self.hall.new_generation(http, ask, requests)
        if ask.stream:
            return PayloadStream(self._payloads(call, ask))
        answers = await call.request_outputs()
        return vllm_generate.format_vllm_generate_response(
            ask,
            list(answers),
            id=ask.id or answers[0].id,
            model=self.hall.settings.served_model_name,
            created=int(time.time()),
        )

    async def _payloads(
        self, call: Generation, ask: vllm_generate.VLLMGenerateRequest
    ) -> AsyncIterator[dict[str, Any]]:
        shown = {"request_id": ask.id or call.requests[0].id}
        async with call.stream() as deltas:
            async for i, delta in deltas:
                yield shown | vllm_generate.format_vllm_generate_chunk(ask, i, delta)
