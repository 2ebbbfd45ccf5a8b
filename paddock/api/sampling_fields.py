"""Sampling fields of request bodies into SamplingParams."""

import json
from collections.abc import Mapping, Sized
from typing import Any

from paddock.api.body import RequestBody
from paddock.records import ApiError, Grammar, LogitBias, SamplingParams

OPENAI_FIELD_NAMES = {  # SamplingParams field -> name in OpenAI-like APIs
    "max_new_tokens": "max_tokens",
    "thinking_budget": "thinking_token_budget",
}
MAX_STOP_STRINGS, MAX_STOP_CHARS, MAX_TOKEN_IDS = (
    64,
    1000,
    1024,
)  # every sampled token is checked against them


class SamplingFields(RequestBody):
    """The sampling fields that OpenAI-like APIs share."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # -1 and 0: no limit
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None


class RoutingFields(RequestBody):
    """The fields that identify a request and route it."""

    user: str | None = None
    session_id: str | None = None
    routed_dp_rank: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    rid: str | None = None
    request_id: str | None = None


def parse_sampling_params(
    fields: SamplingFields,
    *,
    max_new_tokens: int | None,
    defaults: SamplingParams,
    grammar: Grammar | None = None,
    thinking_budget: int | None = None,
) -> SamplingParams:
    """The fields of a body over the server's defaults. Raises ApiError naming an invalid field."""

    def given(value: Any, default: Any) -> Any:
        return default if value is None else value

    top_k = fields.top_k if fields.top_k is None or fields.top_k > 0 else None
    if fields.top_k is None:
        top_k = defaults.top_k
    min_new_tokens = defaults.min_new_tokens
    biases = (
        defaults.logit_bias if fields.logit_bias is None else parse_logit_bias(fields.logit_bias)
    )
    return make_sampling_params(
        max_new_tokens=max_new_tokens,
        min_new_tokens=given(
            fields.min_tokens,
            min_new_tokens if max_new_tokens is None else min(min_new_tokens, max_new_tokens),
        ),
        temperature=float(given(fields.temperature, defaults.temperature)),
        top_p=float(given(fields.top_p, defaults.top_p)),
        top_k=top_k,
        min_p=float(given(fields.min_p, defaults.min_p)),
        repetition_penalty=float(given(fields.repetition_penalty, defaults.repetition_penalty)),
        frequency_penalty=float(given(fields.frequency_penalty, defaults.frequency_penalty)),
        presence_penalty=float(given(fields.presence_penalty, defaults.presence_penalty)),
        logit_bias=biases,
        stop_token_ids=tuple(given(fields.stop_token_ids, defaults.stop_token_ids)),
        stop=defaults.stop if fields.stop is None else parse_stop(fields.stop),
        ignore_eos=given(fields.ignore_eos, defaults.ignore_eos),
        seed=given(normalize_seed(fields.seed), defaults.seed),
        thinking_budget=thinking_budget,
        grammar=grammar,
    )


def make_sampling_params(
    names: Mapping[str, str] = OPENAI_FIELD_NAMES, /, **fields: Any
) -> SamplingParams:
    """SamplingParams; an invalid value raises ApiError under the client's name of the field.

    >>> make_sampling_params(max_new_tokens=-1)
    Traceback (most recent call last):
    paddock.records.errors.ApiError: max_tokens: must be at least 1, got -1
    """
    check_id_count(fields.get("stop_token_ids", ()), "stop_token_ids")
    try:
        return SamplingParams(**fields)
    except ValueError as error:
        name, _, why = str(error).partition(":")
        name = names.get(name, name)
        raise ApiError(f"{name}:{why}", param=name) from None


def check_id_count(ids: Sized, name: str) -> None:
    if len(ids) > MAX_TOKEN_IDS:
        raise ApiError(
            f"{name}: {len(ids)} token ids, at most {MAX_TOKEN_IDS} are allowed", param=name
        )


def parse_logit_bias(bias: Mapping[str, float] | None) -> tuple[LogitBias, ...]:
    """
    >>> parse_logit_bias({"7": -100})
    (LogitBias(token_id=7, amount=-100.0),)
    """
    biases = []
    check_id_count(bias or (), "logit_bias")
    for token, amount in (bias or {}).items():
        if not token.isdecimal() or len(token) > 9:
            raise ApiError(
                f"logit_bias: keys must be token ids, got {token!r:.80}", param="logit_bias"
            )
        biases.append(LogitBias(int(token), float(amount)))
    return tuple(biases)


def parse_stop(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None or stop == "":
        return ()
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(texts) > MAX_STOP_STRINGS:
        raise ApiError(
            f"stop: {len(texts)} strings, at most {MAX_STOP_STRINGS} are allowed", param="stop"
        )
    if max(map(len, texts), default=0) > MAX_STOP_CHARS:
        raise ApiError(f"stop: a string is longer than {MAX_STOP_CHARS} characters", param="stop")
    return texts


def normalize_seed(seed: int | None) -> int | None:
    """Clients may send any integer; the engine takes seeds of 63 bits."""
    return None if seed is None else seed % SamplingParams.MAX_SEED


def parse_response_format(
    response_format: Mapping[str, Any] | None, *, path: str = "response_format"
) -> Grammar | None:
    """OpenAI's `response_format`, or `text.format` of the Responses API.

    >>> schema = {"type": "json_schema", "json_schema": {"schema": {"type": "null"}}}
    >>> parse_response_format(schema).text
    '{"type": "null"}'
    """
    kind = (response_format or {}).get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_schema", '{"type": "object"}')
    if kind == "structural_tag":
        return Grammar("structural_tag", json.dumps(response_format, ensure_ascii=False))
    if kind != "json_schema":
        known = "text, json_object, json_schema, structural_tag"
        raise ApiError(f"{path}.type must be one of {known}, got {kind!r:.80}", param=path)
    inner = response_format.get("json_schema", response_format)
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ApiError(f"{path}: json_schema requires a 'schema' object", param=path)
    return Grammar("json_schema", json.dumps(schema, ensure_ascii=False))
