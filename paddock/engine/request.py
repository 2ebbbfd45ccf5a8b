"""What is asked of the engine, what it answers, and what it knows in between."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from paddock.engine.kv_cache import RecurrentStates
from paddock.engine.stats import SpecDecodingStats
from paddock.records import Completion, SamplingParams, Segment

if TYPE_CHECKING:
    from paddock.engine.grammar import GrammarConstraint
    from paddock.engine.stop_strings import StopStringChecker
    from paddock.engine.thinking_budget import ThinkingBudget

FinishReason = Literal["stop", "length", "abort"]


class InvalidRequestError(ValueError):
    """A request no engine with these settings could answer; the message has the numbers."""


class ContextLengthExceededError(InvalidRequestError):
    """The prompt, or the prompt with the reply that is asked for, exceeds the context."""


class EngineError(RuntimeError):
    """The engine could not go on with a request through no fault of the request."""


class EngineQueueFullError(EngineError):
    """As many requests are waiting or running as may; it can be asked again later."""


class DuplicateRequestIdError(EngineError):
    """A request with this id is being answered; it can be asked under another, or later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt and what is wanted of it."""

    token_ids: tuple[int, ...]
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    id: str | None = None  # None: the engine gives it one
    priority: int = 0  # higher goes first
    cache_salt: str = ""  # requests with different salts share no cached pages
    prompt_logprobs_start: int | None = (
        None  # first prompt position whose log-probability is wanted
    )
    top_logprobs: int = 0  # likeliest tokens wanted at each place that has log-probabilities
    logprob_token_ids: tuple[
        int, ...
    ] = ()  # tokens whose log-probability is wanted at each of those places
    return_routing: bool = False  # routed experts and index choices wanted
    in_reasoning: bool | None = None  # None: read it off the prompt's last tokens


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Some tokens at one place, with their log-probabilities."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDelta:
    """What one step added to a reply. Lists run parallel to `token_ids` or are empty."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    forced: tuple[int, ...] = ()  # positions in the whole reply
    version: int
    top_logprobs: tuple[TokenLogprob, ...] = ()
    requested_logprobs: tuple[TokenLogprob, ...] = ()
    output: "RequestOutput | None" = None  # with the last one


@dataclass(frozen=True, slots=True, eq=False)
class RoutingReplay:
    """What the network decided while it read the prompt and wrote the reply, for a trainer to
    decide the same again. One row a token but the last, which was sampled and never read.

    `expert_TLK`: experts of each layer that has any, ascending. `index_TLK`: keys that each layer
    with an indexer kept, ascending positions in the sequence, -1 where there are fewer.
    """

    expert_TLK: np.ndarray | None
    index_TLK: np.ndarray | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A finished request."""

    id: str
    prompt_tokens: int
    completion: Completion
    matched_stop: int | str | None = None  # the stop token or text that ended it
    abort_reason: str = ""  # why it was aborted
    cached_tokens: int = 0  # of the prompt, found in the prefix cache when it was first read
    reasoning_tokens: int = 0
    preemptions: int = 0
    prompt_logprobs: tuple[float | None, ...] = ()  # temperature 1; None for the very first token
    prompt_top_logprobs: tuple[TokenLogprob | None, ...] = ()
    prompt_requested_logprobs: tuple[TokenLogprob | None, ...] = ()
    top_logprobs: tuple[TokenLogprob, ...] = ()
    requested_logprobs: tuple[TokenLogprob, ...] = ()
    routing: RoutingReplay | None = None
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    verify_steps: int = 0
    queue_time_s: float = 0.0
    ttft_s: float | None = None  # after arrival
    e2e_latency_s: float = 0.0

    @property
    def accept_length(self) -> float:
        """Tokens for each step that wrote any."""
        return len(self.completion.token_ids) / max(1, self.verify_steps)


OutputCallback = Callable[[OutputDelta | EngineError], None]  # called on the engine's own thread


@dataclass(eq=False, slots=True)
class Sequence:
    """A request while the engine works on it. Belongs to the engine's thread alone."""

    request: Request
    id: str
    serial: int  # order of arrival
    seed: int
    stop_token_ids: frozenset[int]
    max_new_tokens: int
    on_output: OutputCallback
    stream: bool  # a delta a step, or only the last
    arrived: float
    tokens: list[int]  # prompt and reply
    num_prompt: int = field(init=False)  # tokens of it
    logprobs: list[float] = field(default_factory=list)
    segments: list[list[int]] = field(default_factory=list)  # [version, tokens]
    forced: list[int] = field(default_factory=list)
    top_logprobs: list[TokenLogprob] = field(default_factory=list)
    requested_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    prompt_requested_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    # In the cache:
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens whose rows are there
    num_cached_pages: int = 0  # pages already in the prefix cache
    mixed_versions: bool = False  # rows of more than one version of the weights
    states: RecurrentStates = field(default_factory=dict)
    drafts: list[int] = field(default_factory=list)
    # Along the way:
    thinking_budget: "ThinkingBudget | None" = None
    constraint: "GrammarConstraint | None" = None
    stop_checker: "StopStringChecker | None" = None
    abort_reason: str | None = None
    num_streamed: int = 0  # reply tokens already delivered
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
        """Tokens of the reply."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens not yet in the cache; one while decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def must_complete(self) -> bool:
        """Whether the reply satisfies its grammar within its length."""
        return self.constraint is not None and self.constraint.must_complete

    @property
    def is_decoding(self) -> bool:
        """Whether everything but the newest token of the reply is in the cache."""
        return self.num_generated > 0 and self.num_pending == 1

    @property
    def next_prompt_logprob(self) -> int | None:
        """The first prompt position whose log-probability is still to be found."""
        start = self.request.prompt_logprobs_start
        if start is None or len(self.prompt_logprobs) >= self.num_prompt - start:
            return None
        return start + len(self.prompt_logprobs)

    def reset_prompt_logprobs(self) -> None:
        """The prompt will be read by other weights: no score of the old ones stays."""
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
        matched: int | str | None,
        message: str,
        replay: RoutingReplay | None,
    ) -> RequestOutput:
        """All there is to say of it, now that it is over."""
        first = self.first_token_at
        return RequestOutput(
            id=self.id,
            prompt_tokens=self.num_prompt,
            completion=self.completion(finish),
            matched_stop=matched,
            abort_reason=message,
            cached_tokens=self.cached_tokens or 0,
            reasoning_tokens=self.thinking_budget.tokens if self.thinking_budget else 0,
            preemptions=self.preemptions,
            prompt_logprobs=tuple(self.prompt_logprobs),
            prompt_top_logprobs=tuple(self.prompt_top_logprobs),
            prompt_requested_logprobs=tuple(self.prompt_requested_logprobs),
            top_logprobs=tuple(self.top_logprobs),
            requested_logprobs=tuple(self.requested_logprobs),
            routing=replay,
            draft_tokens=self.draft_tokens,
            accepted_draft_tokens=self.accepted_draft_tokens,
            verify_steps=self.verify_steps,
            queue_time_s=(self.admitted_at or now) - self.arrived,
            ttft_s=None if first is None else first - self.arrived,
            e2e_latency_s=now - self.arrived,
        )
