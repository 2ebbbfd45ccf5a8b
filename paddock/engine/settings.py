"""How an engine runs, decided before it exists."""

from dataclasses import dataclass
from math import prod

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from paddock.config import BaseSettings, ConfigError
from paddock.model import ModelConfig, cost
from paddock.model import config as model_config

SINGLE_THREAD_HIDDEN = 256


class EngineSettings(BaseSettings):
    page_size: PositiveInt = 16
    num_pages: PositiveInt | None = None  # None: what `cache_bytes` holds
    kv_cache_bytes: PositiveInt = 1 << 28
    max_running_requests: PositiveInt = 32  # requests in one step
    max_queued_requests: PositiveInt = 4096  # more are refused
    max_prefill_tokens: PositiveInt = (
        2048  # prompt tokens read in one step, beside those that decode
    )
    context_length: PositiveInt | None = None  # None: the model's
    # Seconds that prompts wait at most to be read together, where decoding is recorded.
    max_prefill_delay_s: NonNegativeFloat = 0.05
    num_speculative_tokens: NonNegativeInt = Field(default=0, le=5)  # tokens drafted ahead
    prefix_caching: bool = True
    cuda_graphs: bool | None = None  # steps recorded once and repeated; None: where a device can
    capture_routing: bool = (
        False  # keep routed experts and index choices, for requests that ask for them
    )
    stop_token_ids: tuple[int, ...] | None = None  # None: the model's and the tokenizer's own
    max_logprobs: NonNegativeInt = 64  # likeliest tokens a request may ask for at each place
    logits_chunk_bytes: PositiveInt = 1 << 27  # of scores over the vocabulary held at once
    seed: NonNegativeInt = Field(default=0, lt=1 << 30)  # of requests that bring none
    max_grammar_bytes: PositiveInt = 1 << 20  # longer grammars are refused
    grammar_timeout_s: PositiveFloat = 10.0  # to compile one
    grammar_memory_bytes: PositiveInt = 1 << 30  # of memory, to compile one
    grammar_cache_bytes: PositiveInt = 1 << 28  # of compiled grammars kept
    page_watermark: PositiveFloat = 0.02  # of the pages, kept free when a request is let in
    # Of one operation on the CPU. None: one for a network as narrow as NARROW, whose operations are
    # over before a second one has begun (nano, 32 requests: twice as fast), else torch's own.
    threads: PositiveInt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig:
    """What the settings come to for one network."""

    num_pages: int
    page_size: int
    context_length: int  # tokens of prompt and reply together
    lookahead_slots: int  # slots behind a sequence's last token that drafting may write to
    bytes_per_token: int

    @property
    def tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def pages_per_sequence(self) -> int:
        return self.pages_for(self.context_length + self.lookahead_slots)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


def num_cpu_threads(settings: EngineSettings, config: ModelConfig) -> int:
    """Of the engine's operations on the CPU."""
    return settings.threads or (
        1 if config.hidden <= SINGLE_THREAD_HIDDEN else torch.get_num_threads()
    )


def resolve_kv_cache_config(
    settings: EngineSettings, config: ModelConfig, itemsize: int
) -> KVCacheConfig:
    """Refuses, with the numbers, what cannot be."""
    recurrent = sorted({kind for kind in config.attention if kind in model_config.LINEAR_ATTENTION})
    if recurrent and settings.prefix_caching:
        raise ConfigError(
            f"'prefix_cache' must be false: {', '.join(recurrent)} layers keep a state, not pages"
        )
    if settings.num_speculative_tokens and config.mtp is None:
        raise ConfigError(
            f"'mtp_steps' is {settings.num_speculative_tokens}, but the model has no MTP layer"
        )
    if settings.num_speculative_tokens > 1 and config.mtp is not None and config.mtp.share_index:
        raise ConfigError(
            f"'mtp_steps' must be at most 1, got {settings.num_speculative_tokens}: the model says "
            f"'index_share_for_mtp_iteration' (later drafts attend to the keys that the first "
            f"selected), which the engine does not do; set it to false in config.json to draft "
            f"without it"
        )
    if settings.num_speculative_tokens and recurrent:
        raise ConfigError(
            f"'mtp_steps' must be 0: a draft cannot be taken out of the state of "
            f"{', '.join(recurrent)} layers"
        )
    context = settings.context_length or config.context
    if context > config.context:
        raise ConfigError(f"'context' {context} exceeds the model's {config.context}")
    per_token = max(1, kv_bytes_per_token(settings, config, itemsize))
    page_bytes = per_token * settings.page_size
    pages = settings.num_pages or settings.kv_cache_bytes // page_bytes
    found = KVCacheConfig(
        num_pages=pages,
        page_size=settings.page_size,
        context_length=context,
        lookahead_slots=2 * settings.num_speculative_tokens,
        bytes_per_token=per_token,
    )
    if pages < found.pages_per_sequence:
        raise ConfigError(
            f"one request of {context} tokens needs {found.pages_per_sequence} pages of "
            f"{settings.page_size} tokens ({found.pages_per_sequence * page_bytes:,} bytes), "
            f"the cache has {pages} ({pages * page_bytes:,} bytes): "
            f"lower 'context' or raise 'cache_bytes'"
        )
    return found


def cached_layers(settings: EngineSettings, config: ModelConfig) -> range:
    """The layers that remember tokens here, the MTP layer only if it drafts."""
    return range(config.layers + (settings.num_speculative_tokens > 0))


def kv_bytes_per_token(settings: EngineSettings, config: ModelConfig, itemsize: int) -> int:
    layers = cached_layers(settings, config)
    rows = sum(
        prod(shape) for layer in layers for shape in cost.kv_cache_shapes(config, layer).values()
    )
    return rows * itemsize
