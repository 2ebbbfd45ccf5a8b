"""How an engine runs, decided before it exists."""

from dataclasses import dataclass
from math import prod

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from paddock.config import BaseSettings, ConfigError
from paddock.model import LINEAR_ATTENTION, ModelConfig
from paddock.model.cost import kv_cache_shapes

NARROW = 256


class EngineSettings(BaseSettings):
    page_tokens: PositiveInt = 16
    pages: PositiveInt | None = None  # None: what `cache_bytes` holds
    cache_bytes: PositiveInt = 1 << 28
    max_running: PositiveInt = 32  # requests in one step
    max_waiting: PositiveInt = 4096  # more are refused
    step_tokens: PositiveInt = 2048  # prompt tokens read in one step, beside those that decode
    context: PositiveInt | None = None  # None: the model's
    # Seconds that prompts wait at most to be read together, where decoding is recorded.
    gather_s: NonNegativeFloat = 0.05
    mtp_steps: NonNegativeInt = Field(default=0, le=5)  # tokens drafted ahead
    prefix_cache: bool = True
    graphs: bool | None = None  # steps recorded once and repeated; None: where a device can
    replay: bool = False  # keep routed experts and index choices, for requests that ask for them
    stop_ids: tuple[int, ...] | None = None  # None: the model's and the tokenizer's own
    max_logprobs: NonNegativeInt = 64  # likeliest tokens a request may ask for at each place
    logits_bytes: PositiveInt = 1 << 27  # of scores over the vocabulary held at once
    seed: NonNegativeInt = Field(default=0, lt=1 << 30)  # of requests that bring none
    grammar_text_bytes: PositiveInt = 1 << 20  # longer grammars are refused
    grammar_s: PositiveFloat = 10.0  # to compile one
    grammar_bytes: PositiveInt = 1 << 30  # of memory, to compile one
    grammar_cache_bytes: PositiveInt = 1 << 28  # of compiled grammars kept
    page_reserve: PositiveFloat = 0.02  # of the pages, kept free when a request is let in
    # Of one operation on the CPU. None: one for a network as narrow as NARROW, whose operations are
    # over before a second one has begun (nano, 32 requests: twice as fast), else torch's own.
    threads: PositiveInt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What the settings come to for one network."""

    pages: int
    page_tokens: int
    context: int  # tokens of prompt and reply together
    ahead: int  # slots behind a sequence's last token that drafting may write to
    bytes_per_token: int

    @property
    def tokens(self) -> int:
        return self.pages * self.page_tokens

    @property
    def pages_per_sequence(self) -> int:
        return self.pages_for(self.context + self.ahead)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)


def threads(settings: EngineSettings, config: ModelConfig) -> int:
    """Of the engine's operations on the CPU."""
    return settings.threads or (1 if config.hidden <= NARROW else torch.get_num_threads())


def capacity(settings: EngineSettings, config: ModelConfig, itemsize: int) -> Capacity:
    """Refuses, with the numbers, what cannot be."""
    recurrent = sorted({kind for kind in config.attention if kind in LINEAR_ATTENTION})
    if recurrent and settings.prefix_cache:
        raise ConfigError(
            f"'prefix_cache' must be false: {', '.join(recurrent)} layers keep a state, not pages"
        )
    if settings.mtp_steps and config.mtp is None:
        raise ConfigError(f"'mtp_steps' is {settings.mtp_steps}, but the model has no MTP layer")
    if settings.mtp_steps > 1 and config.mtp is not None and config.mtp.share_index:
        raise ConfigError(
            f"'mtp_steps' must be at most 1, got {settings.mtp_steps}: the model says "
            f"'index_share_for_mtp_iteration' (later drafts attend to the keys that the first "
            f"selected), which the engine does not do; set it to false in config.json to draft "
            f"without it"
        )
    if settings.mtp_steps and recurrent:
        raise ConfigError(
            f"'mtp_steps' must be 0: a draft cannot be taken out of the state of "
            f"{', '.join(recurrent)} layers"
        )
    context = settings.context or config.context
    if context > config.context:
        raise ConfigError(f"'context' {context} exceeds the model's {config.context}")
    per_token = max(1, bytes_per_token(settings, config, itemsize))
    page_bytes = per_token * settings.page_tokens
    pages = settings.pages or settings.cache_bytes // page_bytes
    found = Capacity(
        pages=pages,
        page_tokens=settings.page_tokens,
        context=context,
        ahead=2 * settings.mtp_steps,
        bytes_per_token=per_token,
    )
    if pages < found.pages_per_sequence:
        raise ConfigError(
            f"one request of {context} tokens needs {found.pages_per_sequence} pages of "
            f"{settings.page_tokens} tokens ({found.pages_per_sequence * page_bytes:,} bytes), "
            f"the cache has {pages} ({pages * page_bytes:,} bytes): "
            f"lower 'context' or raise 'cache_bytes'"
        )
    return found


def cached_layers(settings: EngineSettings, config: ModelConfig) -> range:
    """The layers that remember tokens here, the MTP layer only if it drafts."""
    return range(config.layers + (settings.mtp_steps > 0))


def bytes_per_token(settings: EngineSettings, config: ModelConfig, itemsize: int) -> int:
    layers = cached_layers(settings, config)
    rows = sum(prod(shape) for layer in layers for shape in kv_cache_shapes(config, layer).values())
    return rows * itemsize
