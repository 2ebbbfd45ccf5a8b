"""SGLang's `/generate` from the other side: what a client sends, and how it reads the answer.

Works with our own server and with SGLang's. Ours says of every token which version of the weights
sampled it; SGLang's says it of the whole answer.
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
    """`sampling_params`; reading them back gives the same Sampling. `max_new_tokens` must be said:
    servers have small defaults of their own.

    >>> params = SamplingParams(max_new_tokens=5, top_k=3, seed=1)
    >>> to_sglang_sampling_params(params)["sampling_seed"]
    1
    """
    if sampling.max_new_tokens is None:
        raise ApiError("max_new_tokens: servers need it said", param="max_new_tokens")
    found: dict[str, Any] = {name: getattr(sampling, name) for name in SHARED_FIELDS}
    found |= {
        "max_new_tokens": sampling.max_new_tokens,
        "top_k": -1 if sampling.top_k is None else sampling.top_k,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    if sampling.stop_token_ids:
        found["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.stop:
        found["stop"] = list(sampling.stop)
    if sampling.seed is not None:
        found["sampling_seed"] = sampling.seed
    if sampling.logit_bias:
        found["logit_bias"] = {str(bias.token_id): bias.amount for bias in sampling.logit_bias}
    if sampling.grammar is not None:
        assert sampling.grammar.kind in GRAMMAR_FIELDS
        found[sampling.grammar.kind] = sampling.grammar.text
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOutput:
    """An answer, or as much of it as a stream has told so far."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[Segment, ...]
    forced: tuple[int, ...]
    finish: FinishReason | None  # None while it goes on
    matched: int | str | None
    message: str
    prompt_tokens: int
    cached_tokens: int
    routed_experts: str | None  # base64 of int32, [tokens - 1, layers, chosen]

    @property
    def completion(self) -> Completion:
        if self.finish is None:
            raise ApiError("the answer broke off before it was finished")
        return Completion(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            versions=self.versions,
            finish=self.finish,
            forced=self.forced,
        )


def parse_generate_output(payload: Any, before: GenerateOutput | None = None) -> GenerateOutput:
    """What one payload says. `before` is what a stream has told already: payloads may hold all of
    the answer so far, or only what is new. An ApiError names what is missing or does not fit."""
    if not isinstance(payload, Mapping) or not isinstance(payload.get("meta_info"), Mapping):
        raise ApiError(f"the answer is no answer of /generate: {payload!r:.200}")
    meta = payload["meta_info"]
    ids, logprobs = _tokens(payload, meta)
    total = meta.get("completion_tokens", len(ids))
    if before is not None and len(ids) < total == len(before.token_ids) + len(ids):
        ids, logprobs = before.token_ids + ids, before.logprobs + logprobs
    if total != len(ids):
        raise ApiError(f"completion_tokens: {total}, but {len(ids)} tokens came")
    finish, matched, message = _finish(meta.get("finish_reason"))
    return GenerateOutput(
        token_ids=ids,
        logprobs=logprobs,
        versions=_versions(meta, len(ids), before),
        forced=tuple(meta.get("forced_positions") or ()),
        finish=finish,
        matched=matched,
        message=message,
        prompt_tokens=int(meta.get("prompt_tokens") or 0),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        routed_experts=meta.get("routed_experts"),
    )


def parse_weight_version(label: object) -> int:
    """The number of a version. Servers that were never given weights call theirs "default".

    >>> parse_weight_version("7"), parse_weight_version("step-12"), parse_weight_version("default")
    (7, 12, 0)
    >>> parse_weight_version("latest")
    Traceback (most recent call last):
    paddock.records.errors.ApiError: weight_version: 'latest' carries no number
    """
    if label is None or label == "default":
        return 0
    found = _NUMBER.search(str(label))
    if found is None:
        raise ApiError(f"weight_version: {label!r:.80} carries no number")
    return int(found[1])


def parse_prompt_logprobs(payload: Any, start: int, count: int) -> tuple[float, ...]:
    """Log-probabilities of the prompt's tokens from `start` on, `count` of them."""
    meta = payload.get("meta_info") if isinstance(payload, Mapping) else None
    rows = meta.get("input_token_logprobs") if isinstance(meta, Mapping) else None
    if not isinstance(rows, Sequence) or len(rows) < count:
        got = len(rows) if isinstance(rows, Sequence) else "none"
        raise ApiError(f"input_token_logprobs: {got} for {count} tokens from {start} on")
    values = [row[0] for row in rows[len(rows) - count :]]
    if any(value is None for value in values):
        raise ApiError("input_token_logprobs: the very first token has none")
    return tuple(map(float, values))


def _tokens(
    payload: Mapping[str, Any], meta: Mapping[str, Any]
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Ids and log-probabilities come in pairs, so that neither can shift against the other."""
    pairs = meta.get("output_token_logprobs")
    if pairs is None:
        if payload.get("output_ids"):
            raise ApiError("output_token_logprobs: missing, so nothing can be learned from this")
        return (), ()
    ids = tuple(int(pair[1]) for pair in pairs)
    said = payload.get("output_ids")
    if said is not None and tuple(said) != ids:
        raise ApiError("output_ids: not the tokens that have log-probabilities")
    return ids, tuple(float(pair[0]) for pair in pairs)


def _finish(reason: Any) -> tuple[FinishReason | None, int | str | None, str]:
    if reason is None:
        return None, None, ""
    kind = reason.get("type") if isinstance(reason, Mapping) else reason
    if kind not in _FINISHES:
        raise ApiError(f"finish_reason.type: {kind!r:.80} is none of {', '.join(_FINISHES)}")
    said = reason if isinstance(reason, Mapping) else {}
    return _FINISHES[kind], said.get("matched"), str(said.get("message") or "")


def _versions(
    meta: Mapping[str, Any], count: int, before: GenerateOutput | None
) -> tuple[Segment, ...]:
    starts = meta.get("weight_versions")
    if starts is None and before is not None:  # what came before was sampled by what was said then
        known = sum(segment.tokens for segment in before.versions)
        newest = parse_weight_version(meta.get("weight_version"))
        return _merged([*before.versions, *_segments([[known, newest]], count)])
    if starts is None:
        starts = [[0, meta.get("weight_version")]]
    numbered = [[first, parse_weight_version(label)] for first, label in starts]
    if count and (not numbered or numbered[0][0] != 0):
        raise ApiError("weight_versions: the first does not begin at the first token")
    return _segments(numbered, count)


def _segments(starts: Sequence[Sequence[int]], count: int) -> tuple[Segment, ...]:
    ends = [*(first for first, _ in starts[1:]), count]
    rows = ((version, end - first) for (first, version), end in zip(starts, ends, strict=True))
    return tuple(Segment(version, tokens) for version, tokens in rows if tokens > 0)


def _merged(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    found: list[Segment] = []
    for segment in segments:
        if found and found[-1].version == segment.version:
            found[-1] = Segment(segment.version, found[-1].tokens + segment.tokens)
        else:
            found.append(segment)
    return tuple(found)
