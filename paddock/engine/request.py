"""Request, RequestOutput, and Sequence: the state of a request inside the engine."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from paddock.engine.kv_cache import RecurrentStates
from paddock.engine.stats import SpecDecodingStats
from paddock.records import (
    Completion,
    FinishReason,
    OutputDelta,
    RequestOutput,
    SamplingParams,
    Segment,
    TokenLogprob,
)

if TYPE_CHECKING:
    from paddock.engine.grammar import GrammarConstraint
    from paddock.engine.stop_strings import StopStringChecker
    from paddock.engine.thinking_budget import ThinkingBudget


class InvalidRequestError(ValueError):
    """The request cannot be served with these engine settings; the message has the numbers."""


class ContextLengthExceededError(InvalidRequestError):
    """The prompt, or prompt plus `max_new_tokens`, exceeds the context length."""


class EngineError(RuntimeError):
    """The engine failed; the request is not to blame."""


class EngineQueueFullError(EngineError):
    """Too many requests are queued or running; retry later."""


class DuplicateRequestIdError(EngineError):
    """A request with this id is in flight; use another id or retry later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt with sampling parameters and requested extras."""

    token_ids: tuple[int, ...]
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    id: str | None = None  # None: the engine assigns one
    priority: int = 0  # higher is scheduled first
    cache_salt: str = ""  # requests with different salts share no cached pages
    prompt_logprobs_start: int | None = None  # return prompt log-probabilities from here on
    top_logprobs: int = 0  # number of most likely tokens to return per position
    logprob_token_ids: tuple[int, ...] = ()  # tokens whose log-probability is returned as well
    return_routing: bool = False  # return routed experts and selected (top-k) tokens
    in_reasoning: bool | None = None  # None: derived from the prompt's special tokens


@dataclass(frozen=True, slots=True, eq=False)
class RoutingReplay:
    """Routing decisions for prompt and output, so that a trainer can replay them. One row per
    token except the last, which was sampled but never computed.

    `expert_TLK`: routed experts of each MoE layer, ascending. `index_TLK`: tokens selected by each
    layer with an indexer, as ascending positions in the sequence, padded with -1.
    """

    expert_TLK: np.ndarray | None
    index_TLK: np.ndarray | None


OutputCallback = Callable[[OutputDelta | Exception], None]  # called on the engine thread


@dataclass(eq=False, slots=True)
class Sequence:
    """State of a request inside the engine. Used by the engine thread only."""

    request: Request
    id: str
    serial: int  # arrival order
    seed: int
    stop_token_ids: frozenset[int]
    max_new_tokens: int
    on_output: OutputCallback
    stream: bool  # one delta per step, or only the last
    arrived: float
    tokens: list[int]  # prompt and output
    num_prompt: int = field(init=False)  # number of prompt tokens
    logprobs: list[float] = field(default_factory=list)
    segments: list[list[int]] = field(default_factory=list)  # [version, tokens]
    forced: list[int] = field(default_factory=list)
    top_logprobs: list[TokenLogprob] = field(default_factory=list)
    requested_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    prompt_requested_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    # KV cache:
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens whose KV entries are in the cache
    num_in_flight: int = 0  # tokens sampled by launched steps that the host has not read
    num_cached_pages: int = 0  # leading pages that are in the prefix cache
    mixed_versions: bool = False  # KV entries of more than one weight version
    states: RecurrentStates = field(default_factory=dict)
    drafts: list[int] = field(default_factory=list)
    # Progress:
    thinking_budget: "ThinkingBudget | None" = None
    constraint: "GrammarConstraint | None" = None
    stop_checker: "StopStringChecker | None" = None
    abort_reason: str | None = None
    removed: bool = False  # ended, failed or aborted: later tokens are dropped
    num_streamed: int = 0  # output tokens already delivered
    cached_tokens: int | None = None
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    draft_stats: SpecDecodingStats = field(default_factory=SpecDecodingStats)
    verify_steps: int = 0
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.token_ids)

    @property
    def num_generated(self) -> int:
        """Number of output tokens."""
        return len(self.tokens) - self.num_prompt

    @property
    def length(self) -> int:
        """Number of tokens, including those in flight."""
        return len(self.tokens) + self.num_in_flight

    @property
    def next_index(self) -> int:
        """Index in the output of the next token to be sampled."""
        return self.num_generated + self.num_in_flight

    @property
    def num_pending(self) -> int:
        """Tokens without KV entries; one while decoding."""
        return self.length - self.num_computed

    @property
    def awaits_last_token(self) -> bool:
        """Whether a token in flight is the last that `max_new_tokens` allows."""
        return self.next_index >= self.max_new_tokens

    @property
    def needs_host(self) -> bool:
        """Whether the host must know a token before the next can be sampled: grammars, thinking
        budgets and penalties read it."""
        sampling, thinking = self.request.sampling_params, self.thinking_budget
        return (
            self.constraint is not None
            or (thinking is not None and thinking.budget is not None)
            or sampling.repetition_penalty != 1
            or sampling.frequency_penalty != 0
            or sampling.presence_penalty != 0
        )

    @property
    def must_complete(self) -> bool:
        """Whether the output must complete its grammar within `max_new_tokens`."""
        return self.constraint is not None and self.constraint.must_complete

    @property
    def is_decoding(self) -> bool:
        """Whether prefill is done: only the newest output token is not in the KV cache."""
        return self.next_index > 0 and self.num_pending == 1

    @property
    def next_prompt_logprob(self) -> int | None:
        """The first prompt position whose log-probability is still missing; None if none is."""
        start = self.request.prompt_logprobs_start
        if start is None or len(self.prompt_logprobs) >= self.num_prompt - start:
            return None
        return start + len(self.prompt_logprobs)

    def reset_prompt_logprobs(self) -> None:
        """Drop prompt log-probabilities: the prompt will be recomputed with new weights."""
        self.prompt_logprobs, self.prompt_top_logprobs, self.prompt_requested_logprobs = [], [], []

    def append(self, token: int, logprob: float, version: int) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.segments and self.segments[-1][0] == version:
            self.segments[-1][1] += 1
        else:
            self.segments.append([version, 1])

    def completion(self, finish: FinishReason) -> Completion:
        return Completion(
            token_ids=tuple(self.tokens[self.num_prompt :]),
            logprobs=tuple(self.logprobs),
            versions=tuple(Segment(version, tokens) for version, tokens in self.segments),
            finish=finish,
            forced=tuple(self.forced),
        )

    def to_output(
        self,
        finish: FinishReason,
        *,
        now: float,
        matched_stop: int | str | None,
        abort_reason: str,
        routing: RoutingReplay | None,
    ) -> RequestOutput:
        """The result of the finished request."""
        first = self.first_token_at
        return RequestOutput(
            id=self.id,
            prompt_tokens=self.num_prompt,
            completion=self.completion(finish),
            matched_stop=matched_stop,
            abort_reason=abort_reason,
            cached_tokens=self.cached_tokens or 0,
            reasoning_tokens=self.thinking_budget.tokens if self.thinking_budget else 0,
            preemptions=self.preemptions,
            prompt_logprobs=tuple(self.prompt_logprobs),
            prompt_top_logprobs=tuple(self.prompt_top_logprobs),
            prompt_requested_logprobs=tuple(self.prompt_requested_logprobs),
            top_logprobs=tuple(self.top_logprobs),
            requested_logprobs=tuple(self.requested_logprobs),
            routing=routing,
            draft_tokens=self.draft_tokens,
            accepted_draft_tokens=self.accepted_draft_tokens,
            verify_steps=self.verify_steps,
            queue_time_s=(self.admitted_at or now) - self.arrived,
            ttft_s=None if first is None else first - self.arrived,
            e2e_latency_s=now - self.arrived,
        )
