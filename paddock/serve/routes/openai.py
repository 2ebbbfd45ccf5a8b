"""OpenAI /v1/chat/completions and /v1/completions."""

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

from starlette.requests import Request

from paddock.api import (
    formatter,
    openai_chat_request,
    openai_completions,
    openai_usage,
    parse_body,
    sglang_format,
    sglang_request,
)
from paddock.http import JsonRouter, PayloadStream
from paddock.records import ApiError, RequestOutput
from paddock.serve.chat_service import ChatService, ReturnOptions
from paddock.serve.generation import Generation


class OpenAIRoutes:
    def __init__(self, service: ChatService) -> None:
        self.service = service

    def register(self, router: JsonRouter) -> None:
        router.add_route(
            "/v1/chat/completions",
            self.chat_completions,
            body=openai_chat_request.ChatCompletionBody,
        )
        router.add_route(
            "/v1/completions", self.completions, body=openai_completions.CompletionBody
        )

    # --- chat -------------------------------------------------------------------------------------

    async def chat_completions(self, http: Request, value: Any) -> Any:
        body = parse_body(openai_chat_request.ChatCompletionBody, value)
        self.service.check_model(body.model)
        api_request = openai_chat_request.parse_chat_request(
            body, self.service.default_sampling_params, self.service.default_thinking
        )
        prompt = await self.service.render_prompt(api_request)
        requests = self.service.build_requests(api_request, prompt, n=api_request.n)
        generation = self.service.new_generation(http, api_request, requests)
        envelope = self.service.formatter_context.new_chat_envelope(api_request, generation.version)
        formatters = [
            formatter.ChatCompletionFormatter(
                self.service.formatter_context, api_request, prompt, envelope, i
            )
            for i in range(len(requests))
        ]
        if api_request.stream:
            return PayloadStream(self._chunks(generation, formatters))
        outputs, choices = [], []
        for chat_formatter, delta in zip(formatters, await generation.final_deltas(), strict=True):
            choice, output = chat_formatter.format_choice(delta)
            outputs.append(output)
            choices.append(
                choice | self._extra_fields(api_request, prompt, output, generation.replica)
            )
        return envelope.format_response(choices, outputs)

    def _extra_fields(
        self,
        api_request: openai_chat_request.ChatCompletionRequest,
        prompt: tuple[int, ...],
        output: RequestOutput,
        replica: int,
    ) -> dict[str, Any]:
        """The fields beyond OpenAI's that the client requested."""
        extra: dict[str, Any] = {}
        if api_request.return_prompt_token_ids or api_request.return_token_ids:
            extra["prompt_token_ids"] = list(prompt)
        if api_request.return_token_ids:
            ids = list(output.completion.token_ids)
            extra |= {"token_ids": ids, "response_token_ids": ids}
        if api_request.return_meta_info:
            generate_request = sglang_request.GenerateRequest(
                prompt=prompt, sampling=api_request.sampling, top_logprobs=api_request.top_logprobs
            )
            service = self.service
            response_formatter = sglang_format.GenerateFormatter(
                generate_request,
                prompt,
                service.tokenizer,
                service.token_decoder,
                replica,
                service.labels.label_of,
            )
            extra["meta_info"] = response_formatter.format_meta_info(output)
        return extra

    async def _chunks(
        self, generation: Generation, formatters: list[formatter.ChatCompletionFormatter]
    ) -> AsyncIterator[dict[str, Any]]:
        outputs: list[RequestOutput] = []
        opened: set[int] = set()
        async with generation.stream() as deltas:
            async for i, delta in deltas:
                if i not in opened:
                    opened.add(i)
                    for chunk in formatters[i].start_stream():
                        yield chunk
                for chunk in formatters[i].format_delta(delta):
                    yield chunk
                if delta.output is not None:
                    outputs.append(delta.output)
        for chunk in formatters[0].usage_chunks(outputs):
            yield chunk

    # --- completions ------------------------------------------------------------------------------

    async def completions(self, http: Request, value: Any) -> Any:
        body = parse_body(openai_completions.CompletionBody, value)
        self.service.check_model(body.model)
        api_requests = openai_completions.parse_completion_requests(
            body, self.service.default_sampling_params, max_completions=self.service.max_requests
        )
        if not api_requests:
            raise ApiError("prompt must not be empty", param="prompt")
        prompts = [
            await self.service.tokenize_prompt(api_request.prompt) for api_request in api_requests
        ]
        groups = [
            self.service.build_requests(
                api_request, prompt, n=api_request.n, options=_return_options(api_request)
            )
            for api_request, prompt in zip(_with_unique_ids(api_requests), prompts, strict=True)
        ]
        generation = self.service.new_generation(
            http, api_requests[0], [each for group in groups for each in group]
        )
        formatters = [
            openai_completions.CompletionFormatter(
                api_request, prompt, self.service.tokenizer, self.service.token_decoder
            )
            for api_request, prompt in zip(api_requests, prompts, strict=True)
            for _ in range(api_request.n)
        ]
        envelope = {
            "id": f"cmpl-{api_requests[0].id or uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": api_requests[0].model or self.service.settings.served_model_name,
        }
        if api_requests[0].stream:
            return PayloadStream(
                self._completion_chunks(generation, formatters, envelope, len(api_requests))
            )
        outputs = await generation.request_outputs()
        choices = [
            response_formatter.format_choice(a, i)
            for i, (response_formatter, a) in enumerate(zip(formatters, outputs, strict=True))
        ]
        usage = openai_usage(
            outputs, prompts=len(api_requests), scores_only=api_requests[0].scores_only
        )
        return envelope | {"choices": choices, "usage": usage}

    async def _completion_chunks(
        self,
        generation: Generation,
        formatters: list[openai_completions.CompletionFormatter],
        envelope: dict[str, Any],
        prompts: int,
    ) -> AsyncIterator[dict[str, Any]]:
        streams = [
            openai_completions.CompletionStream(response_formatter, i)
            for i, response_formatter in enumerate(formatters)
        ]
        outputs: dict[int, RequestOutput] = {}
        with_prompt_logprobs = (
            _return_options(formatters[0].request).prompt_logprobs_start is not None
        )
        async with generation.stream() as deltas:
            async for i, delta in deltas:
                if delta.output is not None:
                    outputs[i] = delta.output
                if not with_prompt_logprobs:
                    yield envelope | {"choices": [streams[i].push(delta)]}
                elif i in outputs:  # prompt log-probabilities come first and arrive with the output
                    yield envelope | {"choices": [formatters[i].format_choice(outputs[i], i)]}
        if formatters[0].request.include_usage:
            ordered = [outputs[i] for i in sorted(outputs)]
            usage = openai_usage(
                ordered, prompts=prompts, scores_only=formatters[0].request.scores_only
            )
            yield envelope | {"choices": [], "usage": usage}


def _return_options(api_request: openai_completions.CompletionRequest) -> ReturnOptions:
    with_prompt_logprobs = api_request.echo and api_request.top_logprobs is not None
    return ReturnOptions(prompt_logprobs_start=0 if with_prompt_logprobs else None)


def _with_unique_ids(
    api_requests: list[openai_completions.CompletionRequest],
) -> list[openai_completions.CompletionRequest]:
    """Requests with distinct ids, if one id was given for several prompts."""
    if len(api_requests) == 1:
        return api_requests
    return [
        replace(api_request, id=api_request.id and f"{api_request.id}-{i}")
        for i, api_request in enumerate(api_requests)
    ]
