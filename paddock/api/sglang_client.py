"""SGLang `/generate`, client side: request parameters and response parsing.

Works with Paddock and SGLang servers. Paddock reports the weight version of every token, SGLang
that of the whole response.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paddock.api.sglang_request import GRAMMAR_FIELDS, SHARED_FIELDS
from paddock.records import ApiError, Completion, FinishReason, SamplingParams, Segment

_FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_NUMBER = re.compile(r"(\d{1,18})$")


def to_sglang_sampling_params(sampling: SamplingParams) -> dict[str, Any]:
    """`sampling_params` of a request; parsing them gives the same SamplingParams. `max_new_tokens`
    is required, because servers have small defaults of their own.

    >>> params = SamplingParams(max_new_tokens=5, top_k=3, seed=1)
    >>> to_sglang_sampling_params(params)["sampling_seed"]
    1
    """
    if sampling.max_new_tokens is None:
        raise ApiError("max_new_tokens must be set", param="max_new_tokens")
    params: dict[str, Any] = {name: getattr(sampling, name) for name in SHARED_FIELDS}
    params |= {
        "max_new_tokens": sampling.max_new_tokens,
        "top_k": -1 if sampling.top_k is None else sampling.top_k,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    if sampling.logit_bias:
        params["logit_bias"] = {str(bias.token_id): bias.amount for bias in sampling.logit_bias}
    if sampling.grammar is not None:
        assert sampling.grammar.kind in GRAMMAR_FIELDS
        params[sampling.grammar.kind] = sampling.grammar.text
    return params


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOutput:
    """A completion, or the part of it that a stream has delivered so far."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[Segment, ...]
    forced: tuple[int, ...]
    finish: FinishReason | None  # None while in progress
    matched: int | str | None
    message: str
    prompt_tokens: int
    cached_tokens: int
    routed_experts: str | None  # base64 of int32, [tokens - 1, layers, top-k]

    @property
    def completion(self) -> Completion:
        if self.finish is None:
            raise ApiError("the response ended before the completion was finished")
        return Completion(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            versions=self.versions,
            finish=self.finish,
            forced=self.forced,
        )


def parse_generate_output(payload: Any, previous: GenerateOutput | None = None) -> GenerateOutput:
    """The output in one payload. `previous` is what the stream has delivered already: payloads may
    be cumulative or incremental. Raises ApiError naming what is missing or inconsistent."""
    if not isinstance(payload, Mapping) or not isinstance(payload.get("meta_info"), Mapping):
        raise ApiError(f"not a /generate response: {payload!r:.200}")
    meta = payload["meta_info"]
    ids, logprobs = _tokens(payload, meta)
    total = meta.get("completion_tokens", len(ids))
    if previous is not None and len(ids) < total == len(previous.token_ids) + len(ids):
        ids, logprobs = previous.token_ids + ids, previous.logprobs + logprobs
    if total != len(ids):
        raise ApiError(f"completion_tokens is {total}, but {len(ids)} tokens were received")
    finish, matched, message = _finish(meta.get("finish_reason"))
    return GenerateOutput(
        token_ids=ids,
        logprobs=logprobs,
        versions=_versions(meta, len(ids), previous),
        forced=tuple(meta.get("forced_positions") or ()),
        finish=finish,
        matched=matched,
        message=message,
        prompt_tokens=int(meta.get("prompt_tokens") or 0),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        routed_experts=meta.get("routed_experts"),
    )


def parse_weight_version(label: object) -> int:
    """The number in a weight version. Servers without weight updates report "default".

    >>> parse_weight_version("7"), parse_weight_version("step-12"), parse_weight_version("default")
    (7, 12, 0)
    >>> parse_weight_version("latest")
    Traceback (most recent call last):
    paddock.records.errors.ApiError: weight_version: 'latest' contains no number
    """
    if label is None or label == "default":
        return 0
    params = _NUMBER.search(str(label))
    if params is None:
        raise ApiError(f"weight_version: {label!r:.80} contains no number")
    return int(params[1])


def parse_prompt_logprobs(payload: Any, start: int, count: int) -> tuple[float, ...]:
    """Log-probabilities of `count` prompt tokens from `start` on."""
    meta = payload.get("meta_info") if isinstance(payload, Mapping) else None
    rows = meta.get("input_token_logprobs") if isinstance(meta, Mapping) else None
    if not isinstance(rows, Sequence) or len(rows) < count:
        got = len(rows) if isinstance(rows, Sequence) else "none"
        raise ApiError(f"input_token_logprobs: {got} for {count} tokens from {start} on")
    values = [row[0] for row in rows[len(rows) - count :]]
    if any(value is None for value in values):
        raise ApiError("input_token_logprobs: the first token of a prompt has no log-probability")
    return tuple(map(float, values))


def _tokens(
    payload: Mapping[str, Any], meta: Mapping[str, Any]
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Token ids and log-probabilities, taken from the same pairs so that they cannot misalign."""
    pairs = meta.get("output_token_logprobs")
    if pairs is None:
        if payload.get("output_ids"):
            raise ApiError("output_token_logprobs is missing: the completion cannot be trained on")
        return (), ()
    ids = tuple(int(pair[1]) for pair in pairs)
    output_ids = payload.get("output_ids")
    if output_ids is not None and tuple(output_ids) != ids:
        raise ApiError("output_ids do not match output_token_logprobs")
    return ids, tuple(float(pair[0]) for pair in pairs)


def _finish(reason: Any) -> tuple[FinishReason | None, int | str | None, str]:
    if reason is None:
        return None, None, ""
    kind = reason.get("type") if isinstance(reason, Mapping) else reason
    if kind not in _FINISHES:
        raise ApiError(
            f"finish_reason.type: must be one of {', '.join(_FINISHES)}, got {kind!r:.80}"
        )
    fields = reason if isinstance(reason, Mapping) else {}
    return _FINISHES[kind], fields.get("matched"), str(fields.get("message") or "")


def _versions(
    meta: Mapping[str, Any], count: int, previous: GenerateOutput | None
) -> tuple[Segment, ...]:
    starts = meta.get("weight_versions")
    if starts is None and previous is not None:  # earlier tokens keep the version reported then
        known = sum(segment.tokens for segment in previous.versions)
        newest = parse_weight_version(meta.get("weight_version"))
        return _merged([*previous.versions, *_segments([[known, newest]], count)])
    if starts is None:
        starts = [[0, meta.get("weight_version")]]
    numbered = [[first, parse_weight_version(label)] for first, label in starts]
    if count and (not numbered or numbered[0][0] != 0):
        raise ApiError("weight_versions must start at the first token")
    return _segments(numbered, count)


def _segments(starts: Sequence[Sequence[int]], count: int) -> tuple[Segment, ...]:
    ends = [*(first for first, _ in starts[1:]), count]
    rows = ((version, end - first) for (first, version), end in zip(starts, ends, strict=True))
    return tuple(Segment(version, tokens) for version, tokens in rows if tokens > 0)


def _merged(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    params: list[Segment] = []
    for segment in segments:
        if params and params[-1].version == segment.version:
            params[-1] = Segment(segment.version, params[-1].tokens + segment.tokens)
        else:
            params.append(segment)
    return tuple(params)
