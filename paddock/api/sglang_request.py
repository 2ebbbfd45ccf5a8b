"""SGLang `/generate`: request bodies."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paddock.api.body import RequestBody, parse_body
from paddock.api.errors import check_completion_count
from paddock.api.request import ApiRequest, Prompt
from paddock.api.sampling_fields import (
    check_id_count,
    make_sampling_params,
    normalize_seed,
    parse_logit_bias,
    parse_stop,
)
from paddock.records import ApiError, Grammar, SamplingParams

DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's default
SHARED_FIELDS = (
    "temperature", "top_p", "min_p", "min_new_tokens", "ignore_eos",
    "repetition_penalty", "frequency_penalty", "presence_penalty",
)  # fmt: skip
GRAMMAR_FIELDS = ("json_schema", "regex", "ebnf", "structural_tag")


class GenerateBody(RequestBody):
    """Exactly one of `text` and `input_ids`. A list of prompts gives a list of responses."""

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    token_ids_logprob: list[int] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: int | None = None
    return_indexer_topk: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_hidden_states: bool | None = None
    return_sampling_mask: bool | None = None
    session_id: str | None = None
    routing_key: str | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    max_thinking_tokens: int | None = None
    model: str | None = None


SGLANG_FIELD_NAMES = {  # SamplingParams field -> SGLang's name
    "seed": "sampling_seed",
    "thinking_budget": "max_thinking_tokens",
}


class SGLangSamplingBody(RequestBody):
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    n: int | None = None
    sampling_seed: int | None = None
    logit_bias: dict[str, float] | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest(ApiRequest):
    """One prompt with `n` completions."""

    prompt: Prompt
    n: int = 1
    scores_only: bool = False  # only prompt log-probabilities are requested
    prompt_logprobs_start: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    return_text_in_logprobs: bool = False
    skip_special: bool = True
    trim_stop: bool = True
    routed_experts_start: int | None = None  # None: not requested
    return_indexer_topk: bool = False
    return_prompt_token_ids: bool = False


def parse_generate_requests(
    body: GenerateBody, *, max_completions: int
) -> tuple[list[GenerateRequest], bool]:
    """One request per prompt, and whether the response is a list. Raises ApiError for more than
    `max_completions` completions."""
    prompts, many = _prompts(body)
    check_completion_count(len(prompts), max_completions)
    params = body.sampling_params
    each = params if isinstance(params, list) else [params or {}] * len(prompts)
    rids: Sequence[str | None] = body.rid if isinstance(body.rid, list) else [body.rid]
    if isinstance(body.rid, str) and len(prompts) > 1:
        rids = [f"{body.rid}_{i}" for i in range(len(prompts))]
    for name, count in (("sampling_params", len(each)), ("rid", len(rids))):
        if count != len(prompts) and (name, body.rid) != ("rid", None):
            raise ApiError(f"{name}: {count} for {len(prompts)} prompts", param=name)
    if len(rids) != len(prompts):
        rids = [None] * len(prompts)
    for name in ("return_hidden_states", "return_sampling_mask"):
        if getattr(body, name):
            raise ApiError(f"{name} is not supported", param=name)
    found = [
        _generate(body, prompt, parse_body(SGLangSamplingBody, each_params), rid)
        for prompt, each_params, rid in zip(prompts, each, rids, strict=True)
    ]
    check_completion_count(sum(request.n for request in found), max_completions)
    return found, many


def _prompts(body: GenerateBody) -> tuple[list[Prompt], bool]:
    if (body.text is None) == (body.input_ids is None):
        raise ApiError("exactly one of 'text' and 'input_ids' is required", param="input_ids")
    if body.text is not None:
        many = isinstance(body.text, list)
        return (list(body.text) if isinstance(body.text, list) else [body.text]), many
    ids = body.input_ids or []
    if ids and isinstance(ids[0], list):
        return [tuple(each) for each in ids], True  # type: ignore[arg-type]
    return [tuple(ids)], False  # type: ignore[arg-type]


def _generate(
    body: GenerateBody, prompt: Prompt, params: SGLangSamplingBody, rid: str | None
) -> GenerateRequest:
    max_new_tokens = (
        DEFAULT_MAX_NEW_TOKENS if params.max_new_tokens is None else params.max_new_tokens
    )
    n = 1 if params.n is None else params.n
    if n < 1:
        raise ApiError(f"n must be at least 1, got {n}", param="n")
    check_id_count(body.token_ids_logprob or (), "token_ids_logprob")
    start = -1 if body.logprob_start_len is None else body.logprob_start_len
    logprob_start = start if body.return_logprob and start >= 0 else None
    rank = body.data_parallel_rank if body.routed_dp_rank is None else body.routed_dp_rank
    experts = max(0, body.routed_experts_start_len or 0) if body.return_routed_experts else None
    return GenerateRequest(
        model=body.model,
        id=rid,
        prompt=prompt,
        sampling=parse_sglang_sampling_params(params, max_new_tokens, body.max_thinking_tokens),
        scores_only=max_new_tokens == 0,
        stream=bool(body.stream),
        n=n,
        priority=body.priority or 0,
        salt=body.cache_salt or body.extra_key or "",
        session=body.routing_key or body.session_id,
        replica=rank,
        top_logprobs=(body.top_logprobs_num or 0) if body.return_logprob else None,
        prompt_logprobs_start=logprob_start,
        logprob_token_ids=tuple(body.token_ids_logprob or ()) if body.return_logprob else (),
        return_text_in_logprobs=bool(body.return_text_in_logprobs),
        skip_special=params.skip_special_tokens is not False,
        trim_stop=not params.no_stop_trim,
        routed_experts_start=experts,
        return_indexer_topk=bool(body.return_indexer_topk),
        return_prompt_token_ids=bool(body.return_prompt_token_ids),
    )


def parse_sglang_sampling_params(
    params: SGLangSamplingBody, max_new_tokens: int, thinking_budget: int | None
) -> SamplingParams:
    grammars = {kind: getattr(params, kind) for kind in GRAMMAR_FIELDS if getattr(params, kind)}
    if len(grammars) > 1:
        raise ApiError(f"{' and '.join(grammars)}: only one grammar may be given")
    grammar = next((_grammar(kind, value) for kind, value in grammars.items()), None)
    shared = {  # the same name and meaning in SamplingParams
        name: getattr(params, name) for name in SHARED_FIELDS if getattr(params, name) is not None
    }
    return make_sampling_params(
        SGLANG_FIELD_NAMES,
        max_new_tokens=max(1, max_new_tokens) if max_new_tokens >= 0 else max_new_tokens,
        top_k=params.top_k if params.top_k is not None and params.top_k > 0 else None,
        stop_token_ids=tuple(params.stop_token_ids or ()),
        stop=parse_stop(params.stop),
        logit_bias=parse_logit_bias(params.logit_bias),
        seed=normalize_seed(params.sampling_seed),
        thinking_budget=thinking_budget,
        grammar=grammar,
        **shared,
    )


def _grammar(kind: str, value: str | Mapping[str, Any]) -> Grammar:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return Grammar(kind, text)  # type: ignore[arg-type]
