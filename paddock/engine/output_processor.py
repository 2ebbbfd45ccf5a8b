"""Output processor: appends sampled tokens to their sequences and finds the sequences that ended.

N sampled rows, V vocabulary.
"""

from dataclasses import dataclass
from math import isfinite

from torch import Tensor

from paddock.engine.logprobs import logprobs_of_ids, top_logprobs
from paddock.engine.request import Sequence
from paddock.records import FinishReason


@dataclass(frozen=True, slots=True)
class FinishedSequence:
    """A sequence that ended in this step, and why."""

    sequence: Sequence
    finish: FinishReason
    matched_stop: int | str | None = None
    error: str | None = None  # set if the request failed


@dataclass(slots=True)
class SampledRows:
    """The rows of one sequence: first sampled row and number of rows."""

    sequence: Sequence
    first: int
    count: int
    token: int  # index of the first row among the step's tokens
    accepted: int = 0  # sampled tokens that were appended


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Sampled tokens, in chunks."""

    tokens: list[Tensor]
    logprobs: list[Tensor]
    full_logprobs: dict[int, Tensor]  # by first row, for requests that need the whole row


def append_sampled(
    rows: list[SampledRows],
    token_N: list[int],
    logprob_N: list[float],
    sampled: SampledTokens,
    version: int,
) -> list[FinishedSequence]:
    """Append the tokens of these rows; returns the sequences that ended. A token that a later,
    already launched step samples for one of those will be dropped."""
    ended = []
    for row in rows:
        n, sequence = slice(row.first, row.first + row.count), row.sequence
        sequence.num_in_flight -= 1
        end = _append_verified(row, token_N[n], logprob_N[n], sampled, version)
        if end is not None:
            sequence.num_in_flight = 0
            ended.append(end)
        _count(row)
        if sampled.full_logprobs:
            _add_requested_logprobs(row, sampled)
    return ended


def _append_verified(
    row: SampledRows,
    tokens: list[int],
    logprobs: list[float],
    sampled: SampledTokens,
    version: int,
) -> FinishedSequence | None:
    """Append sampled tokens up to and including the first that differs from its draft."""
    sequence = row.sequence
    for j, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        if not isfinite(logprob):
            where = f"at token {len(sequence.tokens)}"
            return FinishedSequence(sequence, "abort", error=f"the logits {where} are not finite")
        forced = _towards_completion(sequence, token)
        if forced != token:
            if j:
                return None  # the next step forces it: only row 0 has the log-probability
            token, logprob = forced, float(sampled.full_logprobs[row.first][0, forced])
            sequence.forced.append(sequence.num_generated)
        _append(sequence, token, logprob, version)
        row.accepted += 1
        error = sequence.constraint.accept_token(token) if sequence.constraint else None
        if error is not None:
            return FinishedSequence(sequence, "abort", error=error)
        end = _check_finished(sequence)
        if end is not None or j + 1 == row.count or sequence.drafts[j] != token:
            return end
    return None


def _append(sequence: Sequence, token: int, logprob: float, version: int) -> None:
    thinking = sequence.thinking_budget
    if thinking is not None:
        if thinking.is_exhausted:
            sequence.forced.append(sequence.num_generated)
        thinking.feed(token)
    sequence.append(token, logprob, version)


def _check_finished(sequence: Sequence) -> FinishedSequence | None:
    """Whether the token just appended ends the sequence."""
    token, check_stop = sequence.tokens[-1], True
    if sequence.num_generated < sequence.request.sampling_params.min_new_tokens:
        check_stop = False
    matched = sequence.stop_checker.feed(token, check=check_stop) if sequence.stop_checker else None
    if check_stop and token in sequence.stop_token_ids:
        return FinishedSequence(sequence, "stop", token)
    if matched is not None:
        return FinishedSequence(sequence, "stop", matched)
    if sequence.constraint is not None and sequence.constraint.finished:
        return FinishedSequence(sequence, "stop", token)
    if sequence.num_generated >= sequence.max_new_tokens:
        return FinishedSequence(sequence, "length")
    return None


def _count(row: SampledRows) -> None:
    sequence = row.sequence
    sequence.verify_steps += 1
    if row.accepted:
        # A later step in flight has the KV entry of the newest token too.
        sequence.num_computed = len(sequence.tokens) - 1 + sequence.num_in_flight
        if row.count > 1:
            sequence.draft_tokens += row.count - 1
            sequence.accepted_draft_tokens += row.accepted - 1
            sequence.draft_stats.observe_draft(proposed=row.count - 1, accepted=row.accepted - 1)


def _add_requested_logprobs(row: SampledRows, sampled: SampledTokens) -> None:
    """Add the extra log-probabilities requested for the sequence."""
    if row.accepted and row.first in sampled.full_logprobs:
        request = row.sequence.request
        logprob_NV = sampled.full_logprobs[row.first][: row.accepted]
        row.sequence.top_logprobs += top_logprobs(logprob_NV, request.top_logprobs)
        row.sequence.requested_logprobs += logprobs_of_ids(logprob_NV, request.logprob_token_ids)


def _towards_completion(sequence: Sequence, token: int) -> int:
    """The token to append instead of `token`, so that the grammar completes in time."""
    left, constraint = sequence.max_new_tokens - sequence.num_generated - 1, sequence.constraint
    return token if constraint is None else constraint.token_towards_completion(token, left)
