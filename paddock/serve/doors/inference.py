"""vLLM's tokens in, tokens out."""

import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request

from paddock.api.body import read
from paddock.api.dialect import Doors, Stream
from paddock.api.inference import TokensAsk, TokensBody, tokens_ask, tokens_chunk, tokens_reply
from paddock.serve.hall import Call, Extras, Hall


class Inference:
    def __init__(self, hall: Hall) -> None:
        self.hall = hall

    def open(self, doors: Doors) -> None:
        doors.add("/inference/v1/generate", self.generate, body=TokensBody)

    async def generate(self, http: Request, value: Any) -> Any:
        body = read(TokensBody, value)
        self.hall.refuse_unknown(body.model)
        ask = tokens_ask(body, self.hall.defaults)
        scored = ask.prompt_logprobs is not None
        extras = Extras(
            prompt_logprobs_from=0 if scored else None,
            top_logprobs=max(ask.top_logprobs or 0, ask.prompt_logprobs or 0),
        )
        requests = self.hall.requests(ask, ask.prompt, n=ask.n, extras=extras)
        call = self.hall.call(http, ask, requests)
        if ask.stream:
            return Stream(self._payloads(call, ask))
        answers = await call.whole()
        return tokens_reply(
            ask,
            list(answers),
            id=ask.id or answers[0].id,
            model=self.hall.settings.served_name,
            created=int(time.time()),
        )

    async def _payloads(self, call: Call, ask: TokensAsk) -> AsyncIterator[dict[str, Any]]:
        shown = {"request_id": ask.id or call.requests[0].id}
        async with call.deltas() as deltas:
            async for i, delta in deltas:
                yield shown | tokens_chunk(ask, i, delta)
