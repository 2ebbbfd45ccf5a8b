"""Engine settings, and the KV cache configuration they resolve to for a model."""

from dataclasses import dataclass
from math import prod

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from paddock.config import BaseSettings, ConfigError
from paddock.kernels import cpu
from paddock.model import ModelConfig, cost
from paddock.model import config as model_config

SINGLE_THREAD_HIDDEN = 256  # models up to this width use one CPU thread


class EngineSettings(BaseSettings):
    page_size: PositiveInt = 16
    num_pages: PositiveInt | None = None  # None: as many as fit in `kv_cache_bytes`
    kv_cache_bytes: PositiveInt = 1 << 28
    max_running_requests: PositiveInt = 32  # sequences per step
    max_queued_requests: PositiveInt = 4096  # more are rejected
    max_prefill_tokens: PositiveInt = 2048  # prefill budget per step (chunked prefill)
    context_length: PositiveInt | None = None  # None: the model's
    # With CUDA graphs: how long prefills are delayed at most, so that several share a step.
    max_prefill_delay_s: NonNegativeFloat = 0.05
    num_speculative_tokens: NonNegativeInt = Field(default=0, le=5)  # MTP draft tokens
    prefix_caching: bool = True
    cuda_graphs: bool | None = None  # capture and replay decode steps; None: if supported
    # Launch the next step before the tokens of the last are read. None: with CUDA graphs (small on
    # an H200, 1 / 64 / 256 sequences: 1.16 / 1.28 / 1.27x with them, 0.96 / 0.97 / 0.94x without).
    # Steps with drafts, routing capture, grammars, thinking budgets or penalties are synchronous.
    async_scheduling: bool | None = None
    capture_routing: bool = False  # record routed experts and selected tokens, for routing replay
    stop_token_ids: tuple[int, ...] | None = None  # None: the model's and the tokenizer's
    max_logprobs: NonNegativeInt = 64  # max `top_logprobs` of a request
    logits_chunk_bytes: PositiveInt = 1 << 27  # logits held at once while sampling
    seed: NonNegativeInt = Field(default=0, lt=1 << 30)  # for requests without a seed
    max_grammar_bytes: PositiveInt = 1 << 20  # longer grammars are rejected
    grammar_timeout_s: PositiveFloat = 10.0  # for compiling a grammar
    grammar_memory_bytes: PositiveInt = 1 << 30  # memory for compiling a grammar
    grammar_cache_bytes: PositiveInt = 1 << 28  # of compiled grammars
    page_watermark: PositiveFloat = 0.02  # share of pages kept free when a request is admitted
    # CPU threads per operation. None: one for models up to SINGLE_THREAD_HIDDEN wide, whose
    # operations are too short to share (nano, 32 requests: twice as fast), else torch's default.
    threads: PositiveInt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig:
    """Size and layout of the KV cache of one engine."""

    num_pages: int
    page_size: int
    context_length: int  # prompt and output together
    lookahead_slots: int  # KV slots past the last token that drafting may write
    bytes_per_token: int

    @property
    def tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def pages_per_sequence(self) -> int:
        return self.pages_for(self.context_length + self.lookahead_slots)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


def set_num_threads(settings: EngineSettings, config: ModelConfig) -> None:
    """Set the CPU threads of the engine thread, which calls this."""
    threads = settings.threads or (
        1 if config.hidden <= SINGLE_THREAD_HIDDEN else torch.get_num_threads()
    )
    torch.set_num_threads(threads)
    cpu.set_threads(threads)


def resolve_kv_cache_config(
    settings: EngineSettings, config: ModelConfig, itemsize: int
) -> KVCacheConfig:
    """The KV cache configuration for a model; raises ConfigError for impossible settings."""
    recurrent = sorted({kind for kind in config.attention if kind in model_config.LINEAR_ATTENTION})
    if recurrent and settings.prefix_caching:
        raise ConfigError(
            f"'prefix_caching' must be false: {', '.join(recurrent)} layers have a recurrent state,"
            " not KV pages"
        )
    if settings.num_speculative_tokens and config.mtp is None:
        raise ConfigError(
            f"'num_speculative_tokens' is {settings.num_speculative_tokens}, but the model has no"
            " MTP layer"
        )
    if settings.num_speculative_tokens > 1 and config.mtp is not None and config.mtp.share_index:
        raise ConfigError(
            f"'num_speculative_tokens' must be at most 1, got {settings.num_speculative_tokens}:"
            " the model sets 'index_share_for_mtp_iteration' (later drafts attend to the tokens"
            " that the first selected), which the engine does not support; set it to false in"
            " config.json to draft without it"
        )
    if settings.num_speculative_tokens and recurrent:
        raise ConfigError(
            f"'num_speculative_tokens' must be 0: drafts cannot be rolled back in the state of "
            f"{', '.join(recurrent)} layers"
        )
    context = settings.context_length or config.context
    if context > config.context:
        raise ConfigError(f"'context_length' {context} exceeds the model's {config.context}")
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
            f"the KV cache has {pages} ({pages * page_bytes:,} bytes): "
            f"lower 'context_length' or raise 'kv_cache_bytes'"
        )
    return found


def cached_layers(settings: EngineSettings, config: ModelConfig) -> range:
    """The layers with KV storage; the MTP layer only with speculative decoding."""
    return range(config.layers + (settings.num_speculative_tokens > 0))


def kv_bytes_per_token(settings: EngineSettings, config: ModelConfig, itemsize: int) -> int:
    """KV cache bytes per token, over all cached layers."""
    layers = cached_layers(settings, config)
    values = sum(
        prod(shape) for layer in layers for shape in cost.kv_cache_shapes(config, layer).values()
    )
    return values * itemsize
