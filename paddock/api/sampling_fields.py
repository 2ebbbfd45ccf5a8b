"""How clients say what is to be sampled, and `Sampling`, which is how we do."""

import json
from collections.abc import Mapping, Sized
from typing import Any

from paddock.api.body import RequestBody
from paddock.api.errors import ApiError
from paddock.records import MAX_SEED, Grammar, LogitBias, SamplingParams

OPENAI_FIELD_NAMES = {  # of a Sampling's fields, as most clients call them
    "max_new_tokens": "max_tokens",
    "stop_ids": "stop_token_ids",
    "stop_texts": "stop",
    "thinking_budget": "thinking_token_budget",
}
MAX_STOP_STRINGS, MAX_STOP_CHARS, MAX_TOKEN_IDS = 64, 1000, 1024  # every token is held against them


class SamplingFields(RequestBody):
    """The fields about sampling that the OpenAI-like dialects share."""

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
    """The fields about who asks, and where the answer is to be made."""

    user: str | None = None
    session_id: str | None = None
    routed_dp_rank: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    rid: str | None = None
    request_id: str | None = None


def parse_sampling_params(
    knobs: SamplingFields,
    *,
    most: int | None,
    defaults: SamplingParams,
    grammar: Grammar | None = None,
    thinking_budget: int | None = None,
) -> SamplingParams:
    """The knobs over the server's defaults; an ApiError names the knob that cannot be set so."""

    def given(value: Any, default: Any) -> Any:
        return default if value is None else value

    top_k = knobs.top_k if knobs.top_k is None or knobs.top_k > 0 else None
    if knobs.top_k is None:
        top_k = defaults.top_k
    least = defaults.min_new_tokens
    biases = defaults.logit_bias if knobs.logit_bias is None else parse_logit_bias(knobs.logit_bias)
    return make_sampling_params(
        max_new_tokens=most,
        min_new_tokens=given(knobs.min_tokens, least if most is None else min(least, most)),
        temperature=float(given(knobs.temperature, defaults.temperature)),
        top_p=float(given(knobs.top_p, defaults.top_p)),
        top_k=top_k,
        min_p=float(given(knobs.min_p, defaults.min_p)),
        repetition_penalty=float(given(knobs.repetition_penalty, defaults.repetition_penalty)),
        frequency_penalty=float(given(knobs.frequency_penalty, defaults.frequency_penalty)),
        presence_penalty=float(given(knobs.presence_penalty, defaults.presence_penalty)),
        logit_bias=biases,
        stop_ids=tuple(given(knobs.stop_token_ids, defaults.stop_token_ids)),
        stop_texts=defaults.stop if knobs.stop is None else parse_stop(knobs.stop),
        ignore_eos=given(knobs.ignore_eos, defaults.ignore_eos),
        seed=given(normalize_seed(knobs.seed), defaults.seed),
        thinking_budget=thinking_budget,
        grammar=grammar,
    )


def make_sampling_params(
    names: Mapping[str, str] = OPENAI_FIELD_NAMES, /, **fields: Any
) -> SamplingParams:
    """A Sampling, or an ApiError in the client's own words.

    >>> make_sampling_params(max_new_tokens=-1)
    Traceback (most recent call last):
    paddock.api.errors.ApiError: max_tokens: must be at least 1, got -1
    """
    check_id_count(fields.get("stop_ids", ()), "stop_token_ids")
    try:
        return SamplingParams(**fields)
    except ValueError as error:
        name, _, why = str(error).partition(":")
        name = names.get(name, name)
        raise ApiError(f"{name}:{why}", param=name) from None


def check_id_count(ids: Sized, name: str) -> None:
    if len(ids) > MAX_TOKEN_IDS:
        raise ApiError(f"{name}: {len(ids)} token ids, more than {MAX_TOKEN_IDS}", param=name)


def parse_logit_bias(said: Mapping[str, float] | None) -> tuple[LogitBias, ...]:
    """
    >>> parse_logit_bias({"7": -100})
    (Bias(token_id=7, amount=-100.0),)
    """
    found = []
    check_id_count(said or (), "logit_bias")
    for token, amount in (said or {}).items():
        if not token.isdecimal() or len(token) > 9:
            raise ApiError(f"logit_bias: {token!r:.80} is no token id", param="logit_bias")
        found.append(LogitBias(int(token), float(amount)))
    return tuple(found)


def parse_stop(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None or stop == "":
        return ()
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(texts) > MAX_STOP_STRINGS:
        raise ApiError(f"stop: {len(texts)} texts, more than {MAX_STOP_STRINGS}", param="stop")
    if max(map(len, texts), default=0) > MAX_STOP_CHARS:
        raise ApiError(f"stop: longer than {MAX_STOP_CHARS} characters", param="stop")
    return texts


def normalize_seed(seed: int | None) -> int | None:
    """Seeds may be any whole number; the engine knows those of 63 bits."""
    return None if seed is None else seed % MAX_SEED


def parse_response_format(
    form: Mapping[str, Any] | None, *, where: str = "response_format"
) -> Grammar | None:
    """OpenAI's `response_format`, or `text.format` of the Responses API.

    >>> parse_response_format({"type": "json_schema", "json_schema": {"schema": {"type": "null"}}}).text
    '{"type": "null"}'
    """
    kind = (form or {}).get("type")
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_schema", '{"type": "object"}')
    if kind == "structural_tag":
        return Grammar("structural_tag", json.dumps(form, ensure_ascii=False))
    if kind != "json_schema":
        known = "text, json_object, json_schema, structural_tag"
        raise ApiError(f"{where}.type: {kind!r:.80} is none of {known}", param=where)
    inner = form.get("json_schema", form)
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ApiError(f"{where}: a json_schema without its 'schema'", param=where)
    return Grammar("json_schema", json.dumps(schema, ensure_ascii=False))
