"""What is asked of the engine, what it answers, and what it knows in between."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from paddock.engine.memory import States
from paddock.engine.stats import Drafts
from paddock.records import Completion, SamplingParams, Segment

if TYPE_CHECKING:
    from paddock.engine.grammar import Constraint
    from paddock.engine.stops import StopTexts
    from paddock.engine.thinking import Thinking

Ending = Literal["stop", "length", "abort"]


class RequestRefused(ValueError):
    """A request no engine with these settings could answer; the message has the numbers."""


class ContextExceeded(RequestRefused):
    """The prompt, or the prompt with the reply that is asked for, exceeds the context."""


class EngineFailed(RuntimeError):
    """The engine could not go on with a request through no fault of the request."""


class EngineFull(EngineFailed):
    """As many requests are waiting or running as may; it can be asked again later."""


class DuplicateId(EngineFailed):
    """A request with this id is being answered; it can be asked under another, or later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt and what is wanted of it."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    id: str | None = None  # None: the engine gives it one
    priority: int = 0  # higher goes first
    salt: str = ""  # requests with different salts share no cached pages
    prompt_logprobs_from: int | None = None  # first prompt position whose log-probability is wanted
    top_logprobs: int = 0  # likeliest tokens wanted at each place that has log-probabilities
    ask_ids: tuple[int, ...] = ()  # tokens whose log-probability is wanted at each of those places
    replay: bool = False  # routed experts and index choices wanted
    thinking_open: bool | None = None  # None: read it off the prompt's last tokens


@dataclass(frozen=True, slots=True)
class Likely:
    """Some tokens at one place, with their log-probabilities."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one step added to a reply. Lists run parallel to `token_ids` or are empty."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    forced: tuple[int, ...] = ()  # positions in the whole reply
    version: int
    top: tuple[Likely, ...] = ()
    asked: tuple[Likely, ...] = ()
    answer: "Answer | None" = None  # with the last one


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """What the network decided while it read the prompt and wrote the reply, for a trainer to
    decide the same again. One row a token but the last, which was sampled and never read.

    `expert_TLK`: experts of each layer that has any, ascending. `index_TLK`: keys that each layer
    with an indexer kept, ascending positions in the sequence, -1 where there are fewer.
    """

    expert_TLK: np.ndarray | None
    index_TLK: np.ndarray | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished request."""

    id: str
    prompt_tokens: int
    completion: Completion
    matched: int | str | None = None  # the stop token or text that ended it
    message: str = ""  # why it was aborted
    cached_tokens: int = 0  # of the prompt, found in the prefix cache when it was first read
    reasoning_tokens: int = 0
    retractions: int = 0
    prompt_logprobs: tuple[float | None, ...] = ()  # temperature 1; None for the very first token
    prompt_top: tuple[Likely | None, ...] = ()
    prompt_asked: tuple[Likely | None, ...] = ()
    top: tuple[Likely, ...] = ()
    asked: tuple[Likely, ...] = ()
    replay: Replay | None = None
    drafts_proposed: int = 0
    drafts_accepted: int = 0
    verify_steps: int = 0
    queued_s: float = 0.0
    first_token_s: float | None = None  # after arrival
    total_s: float = 0.0

    @property
    def accept_length(self) -> float:
        """Tokens for each step that wrote any."""
        return len(self.completion.token_ids) / max(1, self.verify_steps)


Deliver = Callable[[Delta | EngineFailed], None]  # called on the engine's own thread


@dataclass(eq=False, slots=True)
class Sequence:
    """A request while the engine works on it. Belongs to the engine's thread alone."""

    request: Request
    id: str
    serial: int  # order of arrival
    seed: int
    stop_ids: frozenset[int]
    max_new: int
    deliver: Deliver
    streamed: bool  # a delta a step, or only the last
    arrived: float
    tokens: list[int]  # prompt and reply
    prompt: int = field(init=False)  # tokens of it
    logprobs: list[float] = field(default_factory=list)
    segments: list[list[int]] = field(default_factory=list)  # [version, tokens]
    forced: list[int] = field(default_factory=list)
    top: list[Likely] = field(default_factory=list)
    asked: list[Likely] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top: list[Likely | None] = field(default_factory=list)
    prompt_asked: list[Likely | None] = field(default_factory=list)
    # In the cache:
    seat: int | None = None
    pages: list[int] = field(default_factory=list)
    computed: int = 0  # tokens whose rows are there
    shared: int = 0  # pages already in the prefix cache
    mixed: bool = False  # rows of more than one version of the weights
    states: States = field(default_factory=dict)
    drafts: list[int] = field(default_factory=list)
    # Along the way:
    thinking: "Thinking | None" = None
    constraint: "Constraint | None" = None
    stop_texts: "StopTexts | None" = None
    aborted: str | None = None
    said: int = 0  # reply tokens already delivered
    cached_tokens: int | None = None
    retractions: int = 0
    drafts_proposed: int = 0
    drafts_accepted: int = 0
    drafted: Drafts = field(default_factory=Drafts)
    verify_steps: int = 0
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    def __post_init__(self) -> None:
        self.prompt = len(self.request.token_ids)

    @property
    def written(self) -> int:
        """Tokens of the reply."""
        return len(self.tokens) - self.prompt

    @property
    def pending(self) -> int:
        """Tokens not yet in the cache; one while decoding."""
        return len(self.tokens) - self.computed

    @property
    def completes(self) -> bool:
        """Whether the reply satisfies its grammar within its length."""
        return self.constraint is not None and self.constraint.completes

    @property
    def writes(self) -> bool:
        """Whether everything but the newest token of the reply is in the cache."""
        return self.written > 0 and self.pending == 1

    @property
    def next_scored(self) -> int | None:
        """The first prompt position whose log-probability is still to be found."""
        start = self.request.prompt_logprobs_from
        if start is None or len(self.prompt_logprobs) >= self.prompt - start:
            return None
        return start + len(self.prompt_logprobs)

    def score_anew(self) -> None:
        """The prompt will be read by other weights: no score of the old ones stays."""
        self.prompt_logprobs, self.prompt_top, self.prompt_asked = [], [], []

    def append(self, token: int, logprob: float, version: int) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.segments and self.segments[-1][0] == version:
            self.segments[-1][1] += 1
        else:
            self.segments.append([version, 1])

    def completion(self, finish: Ending) -> Completion:
        return Completion(
            token_ids=tuple(self.tokens[self.prompt :]),
            logprobs=tuple(self.logprobs),
            versions=tuple(Segment(version, tokens) for version, tokens in self.segments),
            finish=finish,
            forced=tuple(self.forced),
        )

    def answer(
        self,
        finish: Ending,
        *,
        now: float,
        matched: int | str | None,
        message: str,
        replay: Replay | None,
    ) -> Answer:
        """All there is to say of it, now that it is over."""
        first = self.first_token_at
        return Answer(
            id=self.id,
            prompt_tokens=self.prompt,
            completion=self.completion(finish),
            matched=matched,
            message=message,
            cached_tokens=self.cached_tokens or 0,
            reasoning_tokens=self.thinking.tokens if self.thinking else 0,
            retractions=self.retractions,
            prompt_logprobs=tuple(self.prompt_logprobs),
            prompt_top=tuple(self.prompt_top),
            prompt_asked=tuple(self.prompt_asked),
            top=tuple(self.top),
            asked=tuple(self.asked),
            replay=replay,
            drafts_proposed=self.drafts_proposed,
            drafts_accepted=self.drafts_accepted,
            verify_steps=self.verify_steps,
            queued_s=(self.admitted_at or now) - self.arrived,
            first_token_s=None if first is None else first - self.arrived,
            total_s=now - self.arrived,
        )
