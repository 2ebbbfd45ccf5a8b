"""RequestOutput: what an engine returns for a request, whole or as deltas of a stream."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paddock.records.trajectory import Completion


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Some tokens at one position with their log-probabilities."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDelta:
    """New tokens of one step. The sequences are parallel to `token_ids` or empty."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    forced: Sequence[int] = ()  # positions in the whole output
    version: int
    top_logprobs: Sequence[TokenLogprob] = ()
    requested_logprobs: Sequence[TokenLogprob] = ()
    output: "RequestOutput | None" = None  # set on the last delta


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The result of a finished request."""

    id: str = ""
    prompt_tokens: int = 0
    completion: Completion
    matched_stop: int | str | None = None  # stop token id or stop string
    abort_reason: str = ""  # empty unless aborted
    cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    reasoning_tokens: int = 0
    preemptions: int = 0
    prompt_logprobs: Sequence[float | None] = ()  # at temperature 1; None for the first token
    prompt_top_logprobs: Sequence[TokenLogprob | None] = ()
    prompt_requested_logprobs: Sequence[TokenLogprob | None] = ()
    top_logprobs: Sequence[TokenLogprob] = ()
    requested_logprobs: Sequence[TokenLogprob] = ()
    routing: Any = None  # engine.RoutingReplay, or a server's JSON
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    verify_steps: int = 0
    queue_time_s: float = 0.0
    ttft_s: float | None = None  # time to first token
    e2e_latency_s: float = 0.0

    @property
    def accept_length(self) -> float:
        """Generated tokens per decode step."""
        return len(self.completion.token_ids) / max(1, self.verify_steps)
