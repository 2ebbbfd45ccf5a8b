"""Continuation of interrupted completions: the follow-up request, and the merged output."""

from array import array
from dataclasses import replace

from paddock.records import Completion, OutputDelta, SamplingParams, Segment
from paddock.rollout.client import InferenceRequest, RequestOutput, turn_seed


def can_continue(sampling: SamplingParams) -> bool:
    """Whether the rest of a completion can be requested separately.

    Not if it depends on the tokens before: grammar, penalties, stop strings, thinking budget.
    """
    return (
        sampling.grammar is None
        and not sampling.stop
        and sampling.thinking_budget is None
        and sampling.repetition_penalty == 1.0
        and not sampling.frequency_penalty
        and not sampling.presence_penalty
    )


def continuation_request(request: InferenceRequest, done: Completion) -> InferenceRequest | None:
    """The request for the rest; None if `max_new_tokens` is reached."""
    count = len(done.token_ids)
    limit = request.sampling_params.max_new_tokens
    if limit is not None and count >= limit:
        return None
    ids = array("i", request.token_ids)
    ids.extend(done.token_ids)
    sampling = replace(
        request.sampling_params,
        max_new_tokens=None if limit is None else limit - count,
        min_new_tokens=max(0, request.sampling_params.min_new_tokens - count),
        # Sampling uses (seed, index in the completion): the same seed would repeat random numbers.
        seed=turn_seed(request.sampling_params.seed, count)
        if count
        else request.sampling_params.seed,
    )
    return replace(
        request,
        token_ids=ids,
        sampling_params=sampling,
        id=f"{request.id}+{count}" if request.id else "",
    )


def concat_completions(one: Completion, other: Completion) -> Completion:
    """Two parts of a completion as one.

    >>> part = Completion(token_ids=(5,), logprobs=(-1.0,), versions=(Segment(3, 1),),
    ...                   finish="abort", forced=(0,))
    >>> concat_completions(part, part).versions, concat_completions(part, part).forced
    ((Segment(version=3, tokens=2),), (0, 1))
    """
    versions = list(one.versions)
    for segment in other.versions:
        if versions and versions[-1].version == segment.version:
            versions[-1] = Segment(segment.version, versions[-1].tokens + segment.tokens)
        else:
            versions.append(segment)
    count = len(one.token_ids)
    return Completion(
        token_ids=one.token_ids + other.token_ids,
        logprobs=one.logprobs + other.logprobs,
        versions=tuple(versions),
        finish=other.finish,
        forced=(*one.forced, *(count + position for position in other.forced)),
    )


def merge_partial_output(
    before: Completion | None, output: RequestOutput, request: InferenceRequest
) -> RequestOutput:
    """The output of the original request, whose last part is `output`."""
    if before is None:
        return output
    return RequestOutput(
        completion=concat_completions(before, output.completion),
        prompt_tokens=len(request.token_ids),
        id=request.id,
        matched_stop=output.matched_stop,
        abort_reason=output.abort_reason,
        cached_tokens=min(output.cached_tokens, len(request.token_ids)),
        preemptions=output.preemptions + 1,
        routing=output.routing,  # the last part prefilled all tokens before it
    )


class DeltaAccumulator:
    """Accumulates the streamed deltas of a completion."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[Segment] = []

    def add(self, delta: OutputDelta) -> None:
        count = len(delta.token_ids)
        self._ids += delta.token_ids
        self._logprobs += delta.logprobs
        if count and self._versions and self._versions[-1].version == delta.version:
            self._versions[-1] = Segment(delta.version, self._versions[-1].tokens + count)
        elif count:
            self._versions.append(Segment(delta.version, count))

    def completion(self) -> Completion | None:
        if not self._ids:
            return None
        return Completion(
            token_ids=tuple(self._ids),
            logprobs=tuple(self._logprobs),
            versions=tuple(self._versions),
            finish="abort",
        )
