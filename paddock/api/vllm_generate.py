"""vLLM `/inference/v1/generate`: token ids in, token ids out."""

from dataclasses import dataclass
from typing import Any

from paddock.api.body import parse_body
from paddock.api.openai_usage import openai_usage
from paddock.api.request import ApiRequest
from paddock.api.sampling_fields import SamplingFields, parse_sampling_params
from paddock.records import ApiError, OutputDelta, RequestOutput, SamplingParams, TokenLogprob


class VLLMGenerateBody(SamplingFields):
    """`sampling_params` is a VLLMSamplingBody."""

    token_ids: list[int]
    sampling_params: dict[str, Any] | None = None
    request_id: str | None = None
    model: str | None = None
    stream: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None


class VLLMSamplingBody(SamplingFields):
    max_tokens: int | None = None
    n: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMGenerateRequest(ApiRequest):
    prompt: tuple[int, ...]
    n: int = 1
    prompt_logprobs: int | None = None


def parse_vllm_generate_request(
    body: VLLMGenerateBody, defaults: SamplingParams
) -> VLLMGenerateRequest:
    params = parse_body(VLLMSamplingBody, body.sampling_params or {})
    n = 1 if params.n is None else params.n
    if not 1 <= n <= 1024:
        raise ApiError(f"n must be in [1, 1024], got {n}", param="sampling_params")
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) < 0:
            raise ApiError(
                f"{name} must not be negative, got {getattr(params, name)}", param="sampling_params"
            )
    return VLLMGenerateRequest(
        model=body.model,
        id=body.request_id,
        prompt=tuple(body.token_ids),
        sampling=parse_sampling_params(params, max_new_tokens=params.max_tokens, defaults=defaults),
        stream=bool(body.stream),
        priority=body.priority or 0,
        salt=body.cache_salt or "",
        n=n,
        top_logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )


def format_vllm_generate_response(
    request: VLLMGenerateRequest,
    outputs: list[RequestOutput],
    *,
    id: str,
    model: str,
    created: int,
) -> dict[str, Any]:
    return {
        "request_id": id,
        "model": model,
        "created": created,
        "choices": [_choice(request, i, output) for i, output in enumerate(outputs)],
        "usage": openai_usage(outputs),
        "prompt_logprobs": _prompt_logprobs(request, outputs[0]),
    }


def format_vllm_generate_chunk(
    request: VLLMGenerateRequest, index: int, delta: OutputDelta
) -> dict[str, Any]:
    """One stream payload."""
    entries = _entries(request, delta.token_ids, delta.logprobs, delta.top_logprobs)
    finish = delta.output.completion.finish if delta.output is not None else None
    choice = {
        "index": index,
        "token_ids": list(delta.token_ids),
        "finish_reason": finish,
        "logprobs": entries,
    }
    return {"choices": [choice], "usage": openai_usage([delta.output]) if delta.output else None}


def _choice(request: VLLMGenerateRequest, index: int, output: RequestOutput) -> dict[str, Any]:
    done = output.completion
    return {
        "index": index,
        "token_ids": list(done.token_ids),
        "finish_reason": done.finish,
        "stop_reason": output.matched_stop,
        "logprobs": _entries(request, done.token_ids, done.logprobs, output.top_logprobs),
        "weight_version": done.versions[-1].version if done.versions else None,
        "routed_experts": None,
        "sampling_mask": None,
    }


def _entries(
    request: VLLMGenerateRequest, ids: Any, logprobs: Any, top: Any
) -> dict[str, Any] | None:
    if request.top_logprobs is None:
        return None
    content = []
    for i, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        candidates: TokenLogprob | None = top[i] if top and request.top_logprobs else None
        pairs = zip(candidates.token_ids, candidates.logprobs, strict=True) if candidates else ()
        entry = _entry(token_id, logprob)
        top_entries = [_entry(*pair) for pair in pairs][: request.top_logprobs]
        content.append(entry | {"top_logprobs": top_entries})
    return {"content": content}


def _entry(token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token_id}", "logprob": logprob, "bytes": None}


def _prompt_logprobs(
    request: VLLMGenerateRequest, output: RequestOutput
) -> list[dict[str, Any] | None] | None:
    """For each prompt token, its log-probability and those of the top tokens."""
    if request.prompt_logprobs is None:
        return None
    found: list[dict[str, Any] | None] = []
    tops = output.prompt_top_logprobs if request.prompt_logprobs else [None] * len(request.prompt)
    for token_id, logprob, top in zip(request.prompt, output.prompt_logprobs, tops, strict=True):
        if logprob is None:
            found.append(None)
            continue
        candidates = list(zip(top.token_ids, top.logprobs, strict=True)) if top else []
        pairs = {token_id: logprob} | dict(candidates[: request.prompt_logprobs])
        found.append({str(i): {"logprob": x} for i, x in pairs.items()})
    return found
