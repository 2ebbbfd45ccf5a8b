"""Inference engine: continuous batching, paged KV cache, prefix caching and live weight updates.

async_step.py         steps in flight, and their tokens as inputs of the next step
cuda_graphs.py        CUDA graph capture and replay of decode steps
ebnf.py               parser for grammars as xgrammar prints them
engine.py             Engine: the public, thread-safe API
engine_loop.py        the engine thread: inbox, steps, output delivery
grammar.py            grammar-constrained decoding with xgrammar
grammar_automaton.py  pushdown automaton that finds the shortest completion of a grammar
grammar_worker.py     grammar compilation in a killable process
kv_cache.py           paged KV cache and attention metadata of a step
logprobs.py           prompt, top-k and requested log-probabilities
model_runner.py       launches scheduled steps on the device and reads their tokens
output_processor.py   appends sampled tokens and finds sequences that ended
page_allocator.py     reference-counted pages of the KV cache
radix_cache.py        prefix cache: a radix tree over whole pages
request.py            Request, RequestOutput and Sequence
routing_capture.py    records routed experts and selected tokens for routing replay
sampler.py            batched sampling with logit constraints and reproducible noise
scheduler.py          continuous-batching scheduler with chunked prefill and preemption
settings.py           EngineSettings and the KV cache size they result in
spec_decode.py        speculative decoding with the MTP layer
stats.py              counters, histograms and EngineStats
stop_strings.py       stop-string detection across token boundaries
stream_bridge.py      asyncio interface: streams and awaited outputs
subprocess_engine.py  SubprocessEngine: an engine in a child process
subprocess_server.py  the child process of a SubprocessEngine
thinking_budget.py    reasoning-token budget of a request
weight_loader.py      validates, stages and copies new weights
weight_updater.py     weight sync: from disk, tensors, a broadcast group or a trainer
"""

import paddock.quant  # noqa: F401  registers the loader of quantized checkpoints
from paddock.engine.engine import Engine
from paddock.engine.engine_loop import PauseMode
from paddock.engine.request import (
    ContextLengthExceededError,
    DuplicateRequestIdError,
    EngineError,
    EngineQueueFullError,
    InvalidRequestError,
    OutputCallback,
    OutputDelta,
    Request,
    RequestOutput,
)
from paddock.engine.settings import EngineSettings, kv_bytes_per_token, resolve_kv_cache_config
from paddock.engine.stats import EngineStats, Histogram, SpecDecodingStats
from paddock.engine.subprocess_engine import SubprocessEngine
from paddock.engine.weight_updater import EngineWeightUpdater, WeightVersionLabels

__all__ = [
    "ContextLengthExceededError",
    "DuplicateRequestIdError",
    "Engine",
    "EngineError",
    "EngineQueueFullError",
    "EngineSettings",
    "EngineStats",
    "EngineWeightUpdater",
    "Histogram",
    "InvalidRequestError",
    "OutputCallback",
    "OutputDelta",
    "PauseMode",
    "Request",
    "RequestOutput",
    "SpecDecodingStats",
    "SubprocessEngine",
    "WeightVersionLabels",
    "kv_bytes_per_token",
    "resolve_kv_cache_config",
]
