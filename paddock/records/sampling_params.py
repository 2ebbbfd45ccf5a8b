"""How a reply is to be sampled: what rollout, doors and engine say to each other about it."""

from dataclasses import dataclass
from math import isfinite
from typing import Literal, get_args

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]

MAX_SEED = 2**63
SAMPLING_EPS = 1e-5  # below, logits divided by the temperature would leave the range of float32


@dataclass(frozen=True, slots=True)
class LogitBias:
    """What is added to one token's logit before temperature."""

    token_id: int
    amount: float

    def __post_init__(self) -> None:
        if self.token_id < 0:
            raise ValueError(f"token_id: {self.token_id} is negative")
        if not isfinite(self.amount):
            raise ValueError(f"amount: {self.amount} is not finite")


@dataclass(frozen=True, slots=True)
class Grammar:
    """A language the reply must belong to, once its thinking is over.

    With `must_complete`, the reply is complete within `max_new_tokens`: thinking leaves room for
    it, and where little is left the shortest way to the end is taken. Marker tokens, <tool_call>
    and the like, are then named by `Token` alone; text cannot spell them.
    """

    kind: GrammarKind
    text: str
    must_complete: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise ValueError(f"kind: {self.kind!r} is none of {', '.join(get_args(GrammarKind))}")
        if not self.text:
            raise ValueError("text: empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The next token's distribution, and when to stop.

    Order: penalties and biases on the logits, grammar, temperature, then top-k, top-p and min-p,
    each on what the one before left over. Temperature 0, or next to it, is greedy. The
    log-probability reported of a token ignores all of this but the temperature (1 when greedy), so
    that a trainer can reproduce it from the weights alone.

    >>> SamplingParams(temperature=0.0).is_greedy
    True
    >>> SamplingParams(top_p=0.0)
    Traceback (most recent call last):
    ValueError: top_p: 0.0 is not in (0, 1]
    """

    max_new_tokens: int | None = None  # None: as many as the context holds
    min_new_tokens: int = 0  # nothing ends the reply before
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0  # of the likeliest token's probability
    repetition_penalty: float = 1.0  # divides or multiplies logits of tokens seen anywhere
    frequency_penalty: float = 0.0  # subtracted per occurrence in the reply
    presence_penalty: float = 0.0  # subtracted once if in the reply
    logit_bias: tuple[LogitBias, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # besides those the engine stops at anyway
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False  # stop at `stop_token_ids` and `stop` alone
    seed: int | None = None  # the same seed, the same reply, whatever else is being answered
    thinking_budget: int | None = None  # reasoning tokens before </think> is put there
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for complaint in _complaints(self):
            raise ValueError(complaint)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < SAMPLING_EPS

    @property
    def logprob_temperature(self) -> float:
        """What log-probabilities are taken at."""
        return 1.0 if self.is_greedy else self.temperature


def _complaints(s: SamplingParams) -> list[str]:
    """What no sampler could do, each with the field first."""
    checks = [
        (s.max_new_tokens is None or s.max_new_tokens >= 1, "max_new_tokens", "is less than 1"),
        (s.min_new_tokens >= 0, "min_new_tokens", "is negative"),
        (isfinite(s.temperature) and s.temperature >= 0, "temperature", "is not at least 0"),
        (0 < s.top_p <= 1, "top_p", "is not in (0, 1]"),
        (s.top_k is None or s.top_k >= 1, "top_k", "is less than 1"),
        (0 <= s.min_p <= 1, "min_p", "is not in [0, 1]"),
        (
            isfinite(s.repetition_penalty) and s.repetition_penalty > 0,
            "repetition_penalty",
            "is not above 0",
        ),
        (-2 <= s.frequency_penalty <= 2, "frequency_penalty", "is not in [-2, 2]"),
        (-2 <= s.presence_penalty <= 2, "presence_penalty", "is not in [-2, 2]"),
        (min(s.stop_token_ids, default=0) >= 0, "stop_token_ids", "has a negative id"),
        (all(s.stop), "stop", "has an empty text"),
        (s.seed is None or 0 <= s.seed < MAX_SEED, "seed", "is not in [0, 2^63)"),
        (s.thinking_budget is None or s.thinking_budget >= 0, "thinking_budget", "is negative"),
    ]
    found = [f"{name}: {getattr(s, name)} {why}" for right, name, why in checks if not right]
    if s.max_new_tokens is not None and s.min_new_tokens > s.max_new_tokens:
        found.append(f"min_new_tokens: {s.min_new_tokens} exceeds max_new_tokens")
    return found
