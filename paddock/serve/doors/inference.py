"""vLLM's tokens in, tokens out."""

import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request

from paddock.api.body import parse_body
from paddock.api.dialect import JsonRouter, PayloadStream
from paddock.api.vllm_generate import (
    VLLMGenerateBody,
    VLLMGenerateRequest,
    format_vllm_generate_chunk,
    format_vllm_generate_response,
    parse_vllm_generate_request,
)
from paddock.serve.hall import Call, Extras, Hall


class Inference:
    def __init__(self, hall: Hall) -> None:
        self.hall = hall

    def open(self, doors: JsonRouter) -> None:
        doors.add_route("/inference/v1/generate", self.generate, body=VLLMGenerateBody)

    async def generate(self, http: Request, value: Any) -> Any:
        body = parse_body(VLLMGenerateBody, value)
        self.hall.refuse_unknown(body.model)
        ask = parse_vllm_generate_request(body, self.hall.defaults)
        scored = ask.prompt_logprobs is not None
        extras = Extras(
            prompt_logprobs_from=0 if scored else None,
            top_logprobs=max(ask.top_logprobs or 0, ask.prompt_logprobs or 0),
        )
        requests = self.hall.requests(ask, ask.prompt, n=ask.n, extras=extras)
        call = self.hall.call(http, ask, requests)
        if ask.stream:
            return PayloadStream(self._payloads(call, ask))
        answers = await call.whole()
        return format_vllm_generate_response(
            ask,
            list(answers),
            id=ask.id or answers[0].id,
            model=self.hall.settings.served_name,
            created=int(time.time()),
        )

    async def _payloads(
        self, call: Call, ask: VLLMGenerateRequest
    ) -> AsyncIterator[dict[str, Any]]:
        shown = {"request_id": ask.id or call.requests[0].id}
        async with call.deltas() as deltas:
            async for i, delta in deltas:
                yield shown | format_vllm_generate_chunk(ask, i, delta)
