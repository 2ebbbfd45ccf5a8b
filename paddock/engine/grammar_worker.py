"""Grammar compilation in a separate process that can be killed.

A few hundred bytes of grammar can take minutes and gigabytes to compile, inside a library call that
cannot be interrupted. So a worker process compiles, under a limit of memory, and its owner kills
it when the time is up or when the client has disconnected. Workers are forked from a server process
that has imported the library already: a killed one is replaced within milliseconds.
"""

import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from threading import Event, Lock
from typing import Any

from paddock.engine.ebnf import restrict_to_valid_json
from paddock.engine.grammar_automaton import PushdownAutomaton, build_automaton
from paddock.records import Grammar

PROBE_TOKENS = 16  # tokens decoded to see how long they take
PROBE_LIMIT_S = 0.2  # for each of them
POLL_S = 0.02  # how soon a disconnected client is noticed
START_TIMEOUT_S = 120.0  # for the first worker, which waits until the library is imported


class GrammarCompileError(ValueError):
    """The text is not a grammar; the message is the library's."""


class GrammarCompileTimeoutError(TimeoutError):
    """Not compiled within the time given."""


class GrammarWorkerCrashError(RuntimeError):
    """The worker ran out of memory or died."""


class GrammarTooSlowError(RuntimeError):
    """Compiled, but too slow to decode with."""


class GrammarCompileCancelledError(RuntimeError):
    """Nobody waits for the result any more."""


class LaneFull(RuntimeError):
    """Too many grammars wait already."""


class GrammarWorkerUnavailableError(RuntimeError):
    """No worker can be started."""


@dataclass(frozen=True, slots=True)
class SerializedTokenizerInfo:
    """A tokenizer as the library sees it, serialized, and a name for it that is unique."""

    name: str
    serialized: str


@dataclass(frozen=True, slots=True)
class GrammarCompileJob:
    vocabulary: str
    grammar: Grammar
    cpu_s: int


@dataclass(frozen=True, slots=True)
class SerializedGrammar:
    """A compiled grammar, serialized, and what is needed to find the shortest way to its end."""

    serialized: str
    automaton: PushdownAutomaton | None


# --- the worker -----------------------------------------------------------------------------------


def run_compile_worker(pipe: Connection, memory_bytes: int) -> None:
    """Compile until the owner closes the pipe, or dies."""
    import xgrammar

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner ends it
    data = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + memory_bytes, data[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compilers: dict[str, Any] = {}
    pipe.send(None)  # ready
    while True:
        try:
            job = pipe.recv()
        except (EOFError, OSError):
            return
        if isinstance(job, SerializedTokenizerInfo):
            info = xgrammar.TokenizerInfo.deserialize_json(job.serialized)
            compilers[job.name] = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
            continue
        pipe.send(_attempt(compilers[job.vocabulary], job))


def _attempt(compiler: Any, job: GrammarCompileJob) -> SerializedGrammar | Exception:
    # An owner that was killed itself can kill nobody.
    spent = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
    resource.setrlimit(resource.RLIMIT_CPU, (spent + job.cpu_s, resource.RLIM_INFINITY))
    try:
        return compile_grammar(compiler, job.grammar)
    except GrammarTooSlowError as error:
        return error
    except MemoryError:
        return GrammarWorkerCrashError("it takes too much memory")
    except Exception as error:  # the library raises whatever its parts raise
        lines = str(error).strip().splitlines()
        if "bad_alloc" in str(error):
            return GrammarWorkerCrashError("it takes too much memory")
        # "[12:00:00] /path/of/the/build.cc:12: what is wrong": neither time nor path is ours.
        return GrammarCompileError(
            lines[-1].rpartition(".cc:")[2].lstrip("0123456789: ") if lines else ""
        )


def compile_grammar(compiler: Any, grammar: Grammar) -> SerializedGrammar:
    import xgrammar

    parse: dict[str, Callable[[str], Any]] = {
        "json_schema": xgrammar.Grammar.from_json_schema,
        "regex": xgrammar.Grammar.from_regex,
        "ebnf": xgrammar.Grammar.from_ebnf,
        "structural_tag": xgrammar.Grammar.from_structural_tag,
    }
    parsed = parse[grammar.kind](grammar.text)
    text = str(parsed)
    if grammar.kind in ("json_schema", "structural_tag"):
        sound = restrict_to_valid_json(text)
        parsed = xgrammar.Grammar.from_ebnf(sound) if sound != text else parsed
        text = sound
    result = compiler.compile_grammar(parsed)
    _probe(result)
    found = build_automaton(text, _printed_regex) if grammar.must_complete else None
    return SerializedGrammar(result.serialize_json(), found)


def _probe(compiled: Any) -> None:
    """Decode a few tokens: a grammar may compile at once and then take minutes at every token,
    which would hold up all requests of the engine."""
    import torch
    import xgrammar

    matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
    words = xgrammar.allocate_token_bitmask(1, compiled.tokenizer_info.vocab_size)
    bits = torch.arange(32, dtype=torch.int32)
    for _ in range(PROBE_TOKENS):
        started = time.thread_time()
        matcher.fill_next_token_bitmask(words)
        if time.thread_time() - started > PROBE_LIMIT_S:
            raise GrammarTooSlowError("it takes too long at every token")
        allowed = ((words.view(-1, 1) >> bits) & 1).flatten().nonzero().flatten()
        if not len(allowed) or not matcher.accept_token(int(allowed[len(allowed) // 2])):
            return


def _printed_regex(pattern: str) -> str:
    import xgrammar

    return str(xgrammar.Grammar.from_regex(pattern))


def _data_bytes() -> int:
    """Of this process, as RLIMIT_DATA counts them."""
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("VmData:"))
    return int(line.split()[1]) * 1024


# --- its owner ------------------------------------------------------------------------------------


class GrammarCompileWorker:
    """One worker process, and those who wait for it in turn."""

    def __init__(self, *, seconds: float, memory_bytes: int, most_waiting: int) -> None:
        self.seconds, self._memory_bytes, self.most_waiting = seconds, memory_bytes, most_waiting
        self._turn, self._count = Lock(), Lock()
        self.waiting = 0
        self._process: Any = None
        self._known: set[str] = set()  # vocabularies of the present process

    def compile(
        self, grammar: Grammar, vocabulary: SerializedTokenizerInfo, cancelled: Event | None
    ) -> SerializedGrammar:
        """Blocks. Raises one of the exceptions above."""
        with self._count:
            if self.waiting >= self.most_waiting:
                raise LaneFull(f"{self.waiting} grammars are waiting to be compiled already")
            self.waiting += 1
        try:
            while not self._turn.acquire(timeout=POLL_S):
                if cancelled is not None and cancelled.is_set():
                    raise GrammarCompileCancelledError
            try:
                return self._compiled(grammar, vocabulary, cancelled)
            finally:
                self._turn.release()
        finally:
            with self._count:
                self.waiting -= 1

    def close(self) -> None:
        with self._turn:
            self._end()

    def _compiled(
        self, grammar: Grammar, vocabulary: SerializedTokenizerInfo, cancelled: Event | None
    ) -> SerializedGrammar:
        if self._process is None or not self._process.is_alive():
            self._end()
            self._begin()
        finished = False
        try:
            if vocabulary.name not in self._known:
                self._pipe.send(vocabulary)
                self._known.add(vocabulary.name)
            self._pipe.send(GrammarCompileJob(vocabulary.name, grammar, int(self.seconds) + 2))
            found = self._reply(self.seconds, cancelled)
            finished = isinstance(
                found, SerializedGrammar | GrammarCompileError | GrammarTooSlowError
            )
        finally:
            if not finished:
                self._end()
        if isinstance(found, Exception):
            raise found
        return found

    def _reply(self, seconds: float, cancelled: Event | None) -> Any:
        deadline = time.monotonic() + seconds
        while not self._pipe.poll(POLL_S):
            if cancelled is not None and cancelled.is_set():
                raise GrammarCompileCancelledError
            if time.monotonic() > deadline:
                raise GrammarCompileTimeoutError
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            raise GrammarWorkerCrashError(
                "it crashes the compiler, or takes too much memory"
            ) from None

    def _begin(self) -> None:
        server = _server()
        self._pipe, theirs = server.Pipe()
        self._process = server.Process(
            target=run_compile_worker,
            args=(theirs, self._memory_bytes),
            name="paddock-grammar",
            daemon=True,
        )
        self._process.start()
        theirs.close()
        self._known = set()
        try:
            self._reply(START_TIMEOUT_S, None)
        except (GrammarWorkerCrashError, GrammarCompileTimeoutError):
            self._end()
            raise GrammarWorkerUnavailableError(
                "the process that compiles grammars did not start; a script that serves an engine "
                "needs its work under `if __name__ == '__main__':`"
            ) from None

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None


def _server() -> ForkServerContext:
    server = get_context("forkserver")
    server.set_forkserver_preload(["xgrammar", __name__])
    return server


# Shared by all engines of this process: a worker is a process, and takes seconds to import torch.
_LANES: dict[tuple[float, int], tuple[GrammarCompileWorker, GrammarCompileWorker]] = {}
_LANES_LOCK = Lock()
FAST_WORKER_S = 1.0


def compile_workers(
    seconds: float, memory_bytes: int
) -> tuple[GrammarCompileWorker, GrammarCompileWorker]:
    """A quick lane, which no grammar holds up for longer than QUICK_S, and a slow one for those
    that need more, up to `seconds`."""
    with _LANES_LOCK:
        if (seconds, memory_bytes) not in _LANES:
            limits = {"memory_bytes": memory_bytes, "most_waiting": 32}
            quick = GrammarCompileWorker(seconds=min(FAST_WORKER_S, seconds), **limits)
            _LANES[seconds, memory_bytes] = (quick, GrammarCompileWorker(seconds=seconds, **limits))
        return _LANES[seconds, memory_bytes]
