"""Requests in, tokens out: the engine that serves a network and rolls out its policy.

subprocess_engine.py  an engine in a process of its own
subprocess_server.py  the process it lives in
stream_bridge.py  asking an engine from asyncio
grammar_automaton.py  the shortest way to the end of a grammar
weight_loader.py  weights on their way into a network that serves
ebnf.py       grammars as xgrammar prints them
engine.py     the engine as everyone else sees it
grammar.py    replies that belong to a language
grammar_worker.py  grammar compilation in a process that can be killed
cuda_graphs.py  steps of decoding, recorded once and repeated
engine_loop.py  the engine's own thread
kv_cache.py   the cache, paged
page_allocator.py  who holds which page
radix_cache.py  pages found again by the tokens that lead to them
weight_updater.py  new weights while requests run
routing_capture.py  experts and keys the network chose, kept for a trainer
request.py    what is asked, what is answered, and what is known in between
model_runner.py  one step on the device
sampler.py    the next token of every row at once
scheduler.py  who is read, who writes and who waits
settings.py   how an engine runs
spec_decode.py  drafts by the MTP layer
stats.py      what an engine has done, in numbers
stop_strings.py  texts that end a reply
thinking_budget.py  how long a reply may think
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
