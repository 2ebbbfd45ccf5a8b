"""Grammar compilation in a separate process that can be killed.

A few hundred bytes of grammar can take minutes and gigabytes to compile, inside a library call that
cannot be interrupted. So a worker process compiles, under a memory limit, and the engine kills it
on timeout or when the client has disconnected. Workers are forked from a fork server that has
imported xgrammar already: a killed worker is replaced within milliseconds.
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

PROBE_TOKENS = 16  # tokens decoded to measure the speed
PROBE_LIMIT_S = 0.2  # for each of them
POLL_S = 0.02  # interval at which cancellation is noticed
START_TIMEOUTS_S = (30.0, 120.0)  # a worker that is not ready in time is replaced once
ORPHAN_CPU_S = 30  # CPU time beyond its limit after which a worker without a parent ends


class GrammarCompileError(ValueError):
    """The text is not a grammar; the message is xgrammar's."""


class GrammarCompileTimeoutError(TimeoutError):
    """Not compiled within the time given."""


class GrammarWorkerCrashError(RuntimeError):
    """The worker ran out of memory or died."""


class GrammarTooSlowError(RuntimeError):
    """Compiled, but too slow to decode with."""


class GrammarCompileCancelledError(RuntimeError):
    """The request was cancelled."""


class GrammarQueueFullError(RuntimeError):
    """Too many grammars are waiting to be compiled."""


class GrammarWorkerUnavailableError(RuntimeError):
    """No worker can be started."""


@dataclass(frozen=True, slots=True)
class SerializedTokenizerInfo:
    """xgrammar's TokenizerInfo, serialized, with a unique name."""

    name: str
    serialized: str


@dataclass(frozen=True, slots=True)
class GrammarCompileJob:
    vocabulary: str
    grammar: Grammar
    cpu_s: int


@dataclass(frozen=True, slots=True)
class SerializedGrammar:
    """A compiled grammar, serialized, and the automaton that finds its shortest completion."""

    serialized: str
    automaton: PushdownAutomaton | None


# --- the worker -----------------------------------------------------------------------------------


def run_compile_worker(pipe: Connection, memory_bytes: int) -> None:
    """Main function of a worker: compiles until the parent closes the pipe or exits."""
    import xgrammar

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
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
        pipe.send(_try_compile(compilers[job.vocabulary], job))


def _try_compile(compiler: Any, job: GrammarCompileJob) -> SerializedGrammar | Exception:
    # A CPU limit too: a parent that was killed cannot kill this process.
    spent = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
    resource.setrlimit(resource.RLIMIT_CPU, (spent + job.cpu_s, resource.RLIM_INFINITY))
    try:
        return compile_grammar(compiler, job.grammar)
    except GrammarTooSlowError as error:
        return error
    except MemoryError:
        return GrammarWorkerCrashError("it takes too much memory")
    except Exception as error:  # xgrammar raises exceptions of any type
        lines = str(error).strip().splitlines()
        if "bad_alloc" in str(error):
            return GrammarWorkerCrashError("it takes too much memory")
        # "[12:00:00] /path/of/the/build.cc:12: message": drop time and path.
        return GrammarCompileError(
            lines[-1].rpartition(".cc:")[2].lstrip("0123456789: ") if lines else ""
        )


def compile_grammar(compiler: Any, grammar: Grammar) -> SerializedGrammar:
    """Compile a grammar, measure its speed and build the automaton if it must complete."""
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
        strict = restrict_to_valid_json(text)
        parsed = xgrammar.Grammar.from_ebnf(strict) if strict != text else parsed
        text = strict
    result = compiler.compile_grammar(parsed)
    _probe(result)
    found = build_automaton(text, _printed_regex) if grammar.must_complete else None
    return SerializedGrammar(result.serialize_json(), found)


def _probe(compiled: Any) -> None:
    """Decode a few tokens: a grammar may compile quickly and then take minutes per token, which
    would block all requests of the engine."""
    import torch
    import xgrammar

    matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
    words = xgrammar.allocate_token_bitmask(1, compiled.tokenizer_info.vocab_size)
    bits = torch.arange(32, dtype=torch.int32)
    for _ in range(PROBE_TOKENS):
        started = time.thread_time()
        matcher.fill_next_token_bitmask(words)
        if time.thread_time() - started > PROBE_LIMIT_S:
            raise GrammarTooSlowError("it takes too long per token")
        allowed = ((words.view(-1, 1) >> bits) & 1).flatten().nonzero().flatten()
        if not len(allowed) or not matcher.accept_token(int(allowed[len(allowed) // 2])):
            return


def _printed_regex(pattern: str) -> str:
    import xgrammar

    return str(xgrammar.Grammar.from_regex(pattern))


def _data_bytes() -> int:
    """Data segment size of this process, as RLIMIT_DATA counts it."""
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("VmData:"))
    return int(line.split()[1]) * 1024


# --- the parent -----------------------------------------------------------------------------------


class GrammarCompileWorker:
    """One worker process and the queue in front of it."""

    def __init__(self, *, seconds: float, memory_bytes: int, max_waiting: int) -> None:
        self.seconds, self._memory_bytes, self.max_waiting = seconds, memory_bytes, max_waiting
        self._worker_lock, self._count_lock = Lock(), Lock()
        self.waiting = 0
        self._process: Any = None
        self._known: set[str] = set()  # tokenizers that the current process has

    def compile(
        self, grammar: Grammar, vocabulary: SerializedTokenizerInfo, cancelled: Event | None
    ) -> SerializedGrammar:
        """Compile a grammar; blocks. Raises one of the exceptions above."""
        with self._count_lock:
            if self.waiting >= self.max_waiting:
                raise GrammarQueueFullError(f"{self.waiting} grammars are waiting to be compiled")
            self.waiting += 1
        try:
            while not self._worker_lock.acquire(timeout=POLL_S):
                if cancelled is not None and cancelled.is_set():
                    raise GrammarCompileCancelledError
            try:
                return self._compile_in_worker(grammar, vocabulary, cancelled)
            finally:
                self._worker_lock.release()
        finally:
            with self._count_lock:
                self.waiting -= 1

    def close(self) -> None:
        with self._worker_lock:
            self._stop()

    def _compile_in_worker(
        self, grammar: Grammar, vocabulary: SerializedTokenizerInfo, cancelled: Event | None
    ) -> SerializedGrammar:
        if self._process is None or not self._process.is_alive():
            self._stop()
            self._start()
        finished = False
        try:
            if vocabulary.name not in self._known:
                self._pipe.send(vocabulary)
                self._known.add(vocabulary.name)
            self._pipe.send(
                GrammarCompileJob(vocabulary.name, grammar, int(self.seconds) + ORPHAN_CPU_S)
            )
            found = self._reply(self.seconds, cancelled)
            finished = isinstance(
                found, SerializedGrammar | GrammarCompileError | GrammarTooSlowError
            )
        finally:
            if not finished:
                self._stop()
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

    def _start(self) -> None:
        for timeout_s in START_TIMEOUTS_S:
            self._fork()
            try:
                self._reply(timeout_s, None)
                return
            except (GrammarWorkerCrashError, GrammarCompileTimeoutError):
                self._stop()
        raise GrammarWorkerUnavailableError(
            "the grammar worker process did not start; a script that runs an engine must put "
            "its code under `if __name__ == '__main__':`"
        )

    def _fork(self) -> None:
        server = _server()
        self._pipe, child_pipe = server.Pipe()
        self._process = server.Process(
            target=run_compile_worker,
            args=(child_pipe, self._memory_bytes),
            name="paddock-grammar",
            daemon=True,
        )
        self._process.start()
        child_pipe.close()
        self._known = set()

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None


def _server() -> ForkServerContext:
    server = get_context("forkserver")
    server.set_forkserver_preload(["xgrammar", __name__])
    return server


# Shared by all engines of this process: a worker takes seconds to import torch.
_WORKERS: dict[tuple[float, int], tuple[GrammarCompileWorker, GrammarCompileWorker]] = {}
_WORKERS_LOCK = Lock()
FAST_WORKER_S = 1.0


def compile_workers(
    seconds: float, memory_bytes: int
) -> tuple[GrammarCompileWorker, GrammarCompileWorker]:
    """A fast worker, which no grammar blocks for longer than FAST_WORKER_S, and a slow one for
    grammars that need more time, up to `seconds`."""
    with _WORKERS_LOCK:
        if (seconds, memory_bytes) not in _WORKERS:
            limits = {"memory_bytes": memory_bytes, "max_waiting": 32}
            fast = GrammarCompileWorker(seconds=min(FAST_WORKER_S, seconds), **limits)
            _WORKERS[seconds, memory_bytes] = (
                fast,
                GrammarCompileWorker(seconds=seconds, **limits),
            )
        return _WORKERS[seconds, memory_bytes]
