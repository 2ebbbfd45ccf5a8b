"""Sampling parameters of a request: SamplingParams, logit bias and grammar."""

from dataclasses import dataclass
from math import isfinite
from typing import ClassVar, Literal, get_args

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]

MAX_SEED = 2**63
SAMPLING_EPS = 1e-5  # lower temperatures are greedy: logits / temperature would overflow float32


@dataclass(frozen=True, slots=True)
class LogitBias:
    """A value added to one token's logit before temperature."""

    token_id: int
    amount: float

    def __post_init__(self) -> None:
        if self.token_id < 0:
            raise ValueError(f"token_id: must not be negative, got {self.token_id}")
        if not isfinite(self.amount):
            raise ValueError(f"amount: must be finite, got {self.amount}")


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that constrains the output after the reasoning (structured outputs).

    With `must_complete` the output matches the whole grammar within `max_new_tokens`: reasoning is
    cut short to leave enough tokens, and near the limit the shortest completion is forced. Marker
    tokens such as <tool_call> are then reachable through `Token(...)` only, not through text.
    """

    kind: GrammarKind
    text: str
    must_complete: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            kinds = ", ".join(get_args(GrammarKind))
            raise ValueError(f"kind: must be one of {kinds}, got {self.kind!r}")
        if not self.text:
            raise ValueError("text: must not be empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample the next token and when to stop.

    Applied in this order: penalties and logit bias, grammar, temperature, then top-k, top-p and
    min-p, each on what the previous one left. A temperature below SAMPLING_EPS is greedy. Reported
    log-probabilities depend on the weights and the temperature only (1 if greedy), so that a
    trainer can recompute them.

    >>> SamplingParams(temperature=0.0).is_greedy
    True
    >>> SamplingParams(top_p=0.0)
    Traceback (most recent call last):
    ValueError: top_p: must be in (0, 1], got 0.0
    """

    max_new_tokens: int | None = None  # None: up to the context length
    min_new_tokens: int = 0  # the output cannot stop earlier
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0  # relative to the most likely token
    repetition_penalty: float = 1.0  # of tokens in the prompt or output
    frequency_penalty: float = 0.0  # subtracted per occurrence in the output
    presence_penalty: float = 0.0  # subtracted once if in the output
    logit_bias: tuple[LogitBias, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # in addition to the engine's own
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False  # stop at `stop_token_ids` and `stop` only
    seed: int | None = None  # the output does not depend on what else is in the batch
    thinking_budget: int | None = None  # max reasoning tokens before </think> is forced
    grammar: Grammar | None = None
    MAX_SEED: ClassVar[int] = MAX_SEED

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise ValueError(problem)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < SAMPLING_EPS

    @property
    def logprob_temperature(self) -> float:
        """The temperature of the reported log-probabilities."""
        return 1.0 if self.is_greedy else self.temperature


def _problems(s: SamplingParams) -> list[str]:
    """Values out of range, one message each, beginning with the field name."""
    checks = [
        (s.max_new_tokens is None or s.max_new_tokens >= 1, "max_new_tokens", "must be at least 1"),
        (s.min_new_tokens >= 0, "min_new_tokens", "must not be negative"),
        (isfinite(s.temperature) and s.temperature >= 0, "temperature", "must be at least 0"),
        (0 < s.top_p <= 1, "top_p", "must be in (0, 1]"),
        (s.top_k is None or s.top_k >= 1, "top_k", "must be at least 1"),
        (0 <= s.min_p <= 1, "min_p", "must be in [0, 1]"),
        (
            isfinite(s.repetition_penalty) and s.repetition_penalty > 0,
            "repetition_penalty",
            "must be above 0",
        ),
        (-2 <= s.frequency_penalty <= 2, "frequency_penalty", "must be in [-2, 2]"),
        (-2 <= s.presence_penalty <= 2, "presence_penalty", "must be in [-2, 2]"),
        (min(s.stop_token_ids, default=0) >= 0, "stop_token_ids", "must not hold a negative id"),
        (all(s.stop), "stop", "must not hold an empty string"),
        (s.seed is None or 0 <= s.seed < MAX_SEED, "seed", "must be in [0, 2^63)"),
        (
            s.thinking_budget is None or s.thinking_budget >= 0,
            "thinking_budget",
            "must not be negative",
        ),
    ]
    found = [f"{name}: {rule}, got {getattr(s, name)}" for ok, name, rule in checks if not ok]
    if s.max_new_tokens is not None and s.min_new_tokens > s.max_new_tokens:
        found.append(
            f"min_new_tokens: {s.min_new_tokens} exceeds max_new_tokens ({s.max_new_tokens})"
        )
    return found
