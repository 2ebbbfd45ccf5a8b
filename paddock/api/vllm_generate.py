"""vLLM's `/inference/v1/generate`: the same as SGLang's, in other words."""

from dataclasses import dataclass
from typing import Any

from paddock.api.body import parse_body
from paddock.api.delta_parser import OutputDeltaLike, RequestOutputLike
from paddock.api.openai_usage import openai_usage
from paddock.api.request import ApiRequest
from paddock.api.sampling_fields import SamplingFields, parse_sampling_params
from paddock.api.token_decoder import TokenLogprobLike
from paddock.records import ApiError, SamplingParams


class VLLMGenerateBody(SamplingFields):
    """`sampling_params` holds the knobs, `max_tokens`, `n`, `logprobs` and `prompt_logprobs`."""

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
        raise ApiError(f"n: {n} is not in [1, 1024]", param="sampling_params")
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) < 0:
            raise ApiError(f"{name}: {getattr(params, name)} is negative", param="sampling_params")
    return VLLMGenerateRequest(
        model=body.model,
        id=body.request_id,
        prompt=tuple(body.token_ids),
        sampling=parse_sampling_params(params, most=params.max_tokens, defaults=defaults),
        stream=bool(body.stream),
        priority=body.priority or 0,
        salt=body.cache_salt or "",
        n=n,
        top_logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )


def format_vllm_generate_response(
    ask: VLLMGenerateRequest, answers: list[RequestOutputLike], *, id: str, model: str, created: int
) -> dict[str, Any]:
    return {
        "request_id": id,
        "model": model,
        "created": created,
        "choices": [_choice(ask, i, answer) for i, answer in enumerate(answers)],
        "usage": openai_usage(answers),
        "prompt_logprobs": _prompt_logprobs(ask, answers[0]),
    }


def format_vllm_generate_chunk(
    ask: VLLMGenerateRequest, index: int, delta: OutputDeltaLike
) -> dict[str, Any]:
    """One payload of a stream."""
    entries = _entries(ask, delta.token_ids, delta.logprobs, delta.top_logprobs)
    finish = delta.output.completion.finish if delta.output is not None else None
    choice = {
        "index": index,
        "token_ids": list(delta.token_ids),
        "finish_reason": finish,
        "logprobs": entries,
    }
    return {"choices": [choice], "usage": openai_usage([delta.output]) if delta.output else None}


def _choice(ask: VLLMGenerateRequest, index: int, answer: RequestOutputLike) -> dict[str, Any]:
    done = answer.completion
    return {
        "index": index,
        "token_ids": list(done.token_ids),
        "finish_reason": done.finish,
        "stop_reason": answer.matched_stop,
        "logprobs": _entries(ask, done.token_ids, done.logprobs, answer.top_logprobs),
        "weight_version": done.versions[-1].version if done.versions else None,
        "routed_experts": None,
        "sampling_mask": None,
    }


def _entries(ask: VLLMGenerateRequest, ids: Any, logprobs: Any, top: Any) -> dict[str, Any] | None:
    if ask.top_logprobs is None:
        return None
    content = []
    for i, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        likely: TokenLogprobLike | None = top[i] if top and ask.top_logprobs else None
        pairs = zip(likely.token_ids, likely.logprobs, strict=True) if likely else ()
        entry = _entry(token_id, logprob)
        shown = [_entry(*pair) for pair in pairs][: ask.top_logprobs]
        content.append(entry | {"top_logprobs": shown})
    return {"content": content}


def _entry(token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token_id}", "logprob": logprob, "bytes": None}


def _prompt_logprobs(
    ask: VLLMGenerateRequest, answer: RequestOutputLike
) -> list[dict[str, Any] | None] | None:
    """For each token of the prompt, it and the likeliest with their log-probabilities."""
    if ask.prompt_logprobs is None:
        return None
    found: list[dict[str, Any] | None] = []
    tops = answer.prompt_top_logprobs if ask.prompt_logprobs else [None] * len(ask.prompt)
    for token_id, logprob, top in zip(ask.prompt, answer.prompt_logprobs, tops, strict=True):
        if logprob is None:
            found.append(None)
            continue
        likely = list(zip(top.token_ids, top.logprobs, strict=True)) if top else []
        pairs = {token_id: logprob} | dict(likely[: ask.prompt_logprobs])
        found.append({str(i): {"logprob": x} for i, x in pairs.items()})
    return found
