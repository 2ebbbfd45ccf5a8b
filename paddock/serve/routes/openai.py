"""OpenAI's chat completions and completions."""

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

from starlette.requests import Request

from paddock.api import (
    RequestOutputLike,
    formatter,
    openai_chat_request,
    openai_completions,
    openai_usage,
    parse_body,
    sglang_format,
    sglang_request,
)
from paddock.http import JsonRouter, PayloadStream
from paddock.records import ApiError
from paddock.serve.chat_service import ChatService, Generation, ReturnOptions


class OpenAIRoutes:
    def __init__(self, hall: ChatService) -> None:
        self.hall = hall

    def register(self, doors: JsonRouter) -> None:
        doors.add_route(
            "/v1/chat/completions",
            self.chat_completions,
            body=openai_chat_request.ChatCompletionBody,
        )
        doors.add_route("/v1/completions", self.completions, body=openai_completions.CompletionBody)

    # --- chat -------------------------------------------------------------------------------------

    async def chat_completions(self, http: Request, value: Any) -> Any:
        body = parse_body(openai_chat_request.ChatCompletionBody, value)
        self.hall.check_model(body.model)
        ask = openai_chat_request.parse_chat_request(
            body, self.hall.default_sampling_params, self.hall.default_thinking
        )
        prompt = await self.hall.render_prompt(ask)
        requests = self.hall.build_requests(ask, prompt, n=ask.n)
        call = self.hall.new_generation(http, ask, requests)
        frame = self.hall.speaker.new_chat_envelope(ask, call.version)
        voices = [
            formatter.ChatCompletionFormatter(self.hall.speaker, ask, prompt, frame, i)
            for i in range(len(requests))
        ]
        if ask.stream:
            return PayloadStream(self._chunks(call, voices))
        answers, choices = [], []
        for voice, delta in zip(voices, await call.final_deltas(), strict=True):
            shown, answer = voice.format_choice(delta)
            answers.append(answer)
            choices.append(shown | self._extra(ask, prompt, answer, call.replica))
        return frame.format_response(choices, answers)

    def _extra(
        self,
        ask: openai_chat_request.ChatCompletionRequest,
        prompt: tuple[int, ...],
        answer: RequestOutputLike,
        replica: int,
    ) -> dict[str, Any]:
        """What some ask for beyond OpenAI's fields."""
        found: dict[str, Any] = {}
        if ask.shows_prompt or ask.shows_ids:
            found["prompt_token_ids"] = list(prompt)
        if ask.shows_ids:
            ids = list(answer.completion.token_ids)
            found |= {"token_ids": ids, "response_token_ids": ids}
        if ask.shows_meta:
            asked = sglang_request.GenerateRequest(
                prompt=prompt, sampling=ask.sampling, top_logprobs=ask.top_logprobs
            )
            hall = self.hall
            form = sglang_format.GenerateFormatter(
                asked, prompt, hall.tokenizer, hall.spelling, replica, hall.labels.label_of
            )
            found["meta_info"] = form.format_meta_info(answer)
        return found

    async def _chunks(
        self, call: Generation, voices: list[formatter.ChatCompletionFormatter]
    ) -> AsyncIterator[dict[str, Any]]:
        answers: list[RequestOutputLike] = []
        opened: set[int] = set()
        async with call.stream() as deltas:
            async for i, delta in deltas:
                if i not in opened:
                    opened.add(i)
                    for chunk in voices[i].start_stream():
                        yield chunk
                for chunk in voices[i].format_delta(delta):
                    yield chunk
                if delta.output is not None:
                    answers.append(delta.output)
        for chunk in voices[0].usage_chunks(answers):
            yield chunk

    # --- completions ------------------------------------------------------------------------------

    async def completions(self, http: Request, value: Any) -> Any:
        body = parse_body(openai_completions.CompletionBody, value)
        self.hall.check_model(body.model)
        asks = openai_completions.parse_completion_requests(
            body, self.hall.default_sampling_params, most=self.hall.max_requests
        )
        if not asks:
            raise ApiError("prompt: there are none", param="prompt")
        prompts = [await self.hall.tokenize_prompt(ask.prompt) for ask in asks]
        groups = [
            self.hall.build_requests(ask, prompt, n=ask.n, extras=_extras(ask))
            for ask, prompt in zip(_apart(asks), prompts, strict=True)
        ]
        call = self.hall.new_generation(http, asks[0], [each for group in groups for each in group])
        forms = [
            openai_completions.CompletionFormatter(
                ask, prompt, self.hall.tokenizer, self.hall.spelling
            )
            for ask, prompt in zip(asks, prompts, strict=True)
            for _ in range(ask.n)
        ]
        around = {
            "id": f"cmpl-{asks[0].id or uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": asks[0].model or self.hall.settings.served_model_name,
        }
        if asks[0].stream:
            return PayloadStream(self._completion_chunks(call, forms, around, len(asks)))
        answers = await call.request_outputs()
        choices = [
            form.format_choice(a, i) for i, (form, a) in enumerate(zip(forms, answers, strict=True))
        ]
        used = openai_usage(answers, prompts=len(asks), scores_only=asks[0].scores_only)
        return around | {"choices": choices, "usage": used}

    async def _completion_chunks(
        self,
        call: Generation,
        forms: list[openai_completions.CompletionFormatter],
        around: dict[str, Any],
        prompts: int,
    ) -> AsyncIterator[dict[str, Any]]:
        streams = [openai_completions.CompletionStream(form, i) for i, form in enumerate(forms)]
        answers: dict[int, RequestOutputLike] = {}
        scored = _extras(forms[0].ask).prompt_logprobs_from is not None
        async with call.stream() as deltas:
            async for i, delta in deltas:
                if delta.output is not None:
                    answers[i] = delta.output
                if not scored:
                    yield around | {"choices": [streams[i].push(delta)]}
                elif i in answers:  # the prompt's scores go first, and are known with the answer
                    yield around | {"choices": [forms[i].format_choice(answers[i], i)]}
        if forms[0].ask.shows_usage:
            ordered = [answers[i] for i in sorted(answers)]
            used = openai_usage(ordered, prompts=prompts, scores_only=forms[0].ask.scores_only)
            yield around | {"choices": [], "usage": used}


def _extras(ask: openai_completions.CompletionRequest) -> ReturnOptions:
    scored = ask.echo and ask.top_logprobs is not None
    return ReturnOptions(prompt_logprobs_from=0 if scored else None)


def _apart(
    asks: list[openai_completions.CompletionRequest],
) -> list[openai_completions.CompletionRequest]:
    """An id that was given for several prompts, made into one for each."""
    if len(asks) == 1:
        return asks
    return [replace(ask, id=ask.id and f"{ask.id}-{i}") for i, ask in enumerate(asks)]
