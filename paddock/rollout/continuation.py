"""Replies that break off and are gone on with: what is asked next, and the parts as one."""

from array import array
from dataclasses import replace

from paddock.api import RequestOutputLike
from paddock.records import Completion, SamplingParams, Segment
from paddock.rollout.client import InferenceRequest, RequestOutput, turn_seed


def can_continue(sampling: SamplingParams) -> bool:
    """Whether the rest of a reply can be asked for alone. Not where what was said already decides
    what may follow: a grammar, penalties, texts that end it, a budget for thoughts."""
    return (
        sampling.grammar is None
        and not sampling.stop
        and sampling.thinking_budget is None
        and sampling.repetition_penalty == 1.0
        and not sampling.frequency_penalty
        and not sampling.presence_penalty
    )


def continuation_request(ask: InferenceRequest, done: Completion) -> InferenceRequest | None:
    """What is still to be asked for; None if the reply is as long as it may be."""
    count = len(done.token_ids)
    most = ask.sampling_params.max_new_tokens
    if most is not None and count >= most:
        return None
    ids = array("i", ask.token_ids)
    ids.extend(done.token_ids)
    sampling = replace(
        ask.sampling_params,
        max_new_tokens=None if most is None else most - count,
        min_new_tokens=max(0, ask.sampling_params.min_new_tokens - count),
        # Chance is drawn by (seed, index in the reply): the same seed would repeat its luck.
        seed=turn_seed(ask.sampling_params.seed, count) if count else ask.sampling_params.seed,
    )
    return replace(
        ask, token_ids=ids, sampling_params=sampling, id=f"{ask.id}+{count}" if ask.id else ""
    )


def concat_completions(one: Completion, other: Completion) -> Completion:
    """Two parts of a reply.

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
    before: Completion | None, answer: RequestOutputLike, ask: InferenceRequest
) -> RequestOutputLike:
    """The answer to the whole ask, whose last part `answer` is."""
    if before is None:
        return answer
    return RequestOutput(
        completion=concat_completions(before, answer.completion),
        prompt_tokens=len(ask.token_ids),
        id=ask.id,
        matched_stop=answer.matched_stop,
        abort_reason=answer.abort_reason,
        cached_tokens=min(answer.cached_tokens, len(ask.token_ids)),
        preemptions=answer.preemptions + 1,
        routing=answer.routing,  # the last ask read all that came before it
    )
