"""Requests in, tokens out: the engine that serves a network and rolls out its policy.

apart.py      an engine in a process of its own
apart_child.py  the process it lives in
asking.py     asking an engine from asyncio
closing.py    the shortest way to the end of a grammar
delivery.py   weights on their way into a network that serves
ebnf.py       grammars as xgrammar prints them
engine.py     the engine as everyone else sees it
grammar.py    replies that belong to a language
grammar_worker.py  grammar compilation in a process that can be killed
graphs.py     steps of decoding, recorded once and repeated
loop.py       the engine's own thread
memory.py     the cache, paged
pages.py      who holds which page
radix.py      pages found again by the tokens that lead to them
reload.py     new weights while requests run
replay.py     experts and keys the network chose, kept for a trainer
request.py    what is asked, what is answered, and what is known in between
runner.py     one step on the device
sampler.py    the next token of every row at once
scheduler.py  who is read, who writes and who waits
settings.py   how an engine runs
speculate.py  drafts by the MTP layer
stats.py      what an engine has done, in numbers
stops.py      texts that end a reply
thinking.py   how long a reply may think
"""

import paddock.quant  # noqa: F401  so that folders of integers are served too
from paddock.engine.apart import EngineApart
from paddock.engine.delivery import Delivery, Update
from paddock.engine.engine import Engine
from paddock.engine.loop import PauseMode
from paddock.engine.reload import Labels, Reload
from paddock.engine.request import (
    Answer,
    ContextExceeded,
    Delta,
    DuplicateId,
    EngineFailed,
    EngineFull,
    Likely,
    Replay,
    Request,
    RequestRefused,
)
from paddock.engine.settings import Capacity, EngineSettings, capacity
from paddock.engine.stats import Counters, Histogram, Stats

__all__ = [
    "Answer",
    "Capacity",
    "ContextExceeded",
    "Counters",
    "Delivery",
    "Delta",
    "DuplicateId",
    "Engine",
    "EngineApart",
    "EngineFailed",
    "EngineFull",
    "EngineSettings",
    "Histogram",
    "Labels",
    "Likely",
    "PauseMode",
    "Reload",
    "Replay",
    "Request",
    "RequestRefused",
    "Stats",
    "Update",
    "capacity",
]
