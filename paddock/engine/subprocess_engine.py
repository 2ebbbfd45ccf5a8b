"""An engine in a process of its own, so that sampling and learning share no interpreter's lock.

To its owner it looks like an `Engine`. What they say to each other is pickled, several messages at
a time: both are the same program, and nobody else can reach their pipe. Weights do not go through
the pipe but lie in memory that both see: shared memory, or the accelerator's, by its handles.

A process that dies is noticed at once; what it was asked fails with `EngineFailed`. `revive` starts
another, which gets the newest weights before anybody may ask it.
"""

import asyncio
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import count
from logging import getLogger
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import torch.multiprocessing as multiprocessing  # so that tensors travel by reference

from paddock.checkpoint import WeightUpdate
from paddock.engine.engine import Engine
from paddock.engine.engine_loop import PauseMode
from paddock.engine.request import EngineError, OutputDelta, Request
from paddock.engine.settings import KVCacheConfig
from paddock.engine.stats import EngineStats
from paddock.engine.stream_bridge import OutputCallback, StreamBridge
from paddock.engine.subprocess_server import (
    AbortMessage,
    CallMessage,
    FlattenedTensorBucket,
    SubmitMessage,
    run_engine_server,
)

log = getLogger("paddock.engine")

EXIT_TIMEOUT_S = 10.0  # for a process to end by itself
STATS_TIMEOUT_S = 5.0  # for it to say how it fares
MAX_RESTARTS = 3  # processes in a row that die before they are born, and no other is started


class SubprocessEngine(StreamBridge):
    """`build` makes the engine over there: a function that pickle finds by its name, or a partial
    of one. Returns when the engine is there, or raises EngineFailed with what went wrong."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        super().__init__()
        self._build = build
        self._serial = count()
        self._lock = Lock()  # of who waits
        self._pushing = Lock()  # of the newest weights
        self._newest: tuple[list[FlattenedTensorBucket], PauseMode, bool] | None = None
        self._last_stats: EngineStats | None = None
        self._failures = 0
        self._reviving: Thread | None = None
        self._closed = False
        self.broken: str | None = "the engine has not begun"
        self._begin()

    # --- asking -----------------------------------------------------------------------------------

    def submit(self, request: Request, deliver: OutputCallback, *, streamed: bool = False) -> str:
        key = next(self._serial)
        self._expect(key, deliver)
        self._post(SubmitMessage(key, request, streamed))
        return str(key)

    def abort(self, request_id: str) -> None:
        """Of an id that `submit` returned."""
        with self._lock:
            waiting = self._waiting.pop(int(request_id), None)
        if waiting is not None:
            self._post(AbortMessage(int(request_id)))

    # --- steering ---------------------------------------------------------------------------------

    def pause(self, mode: PauseMode = "abort") -> None:
        self._call("pause", mode).result()

    def resume(self) -> None:
        self._call("resume").result()

    def stats(self) -> EngineStats:
        """Numbers of this moment; the last ones, from when it lived, while it does not live or
        does not answer."""
        try:
            self._last_stats = self._call("stats").result(STATS_TIMEOUT_S)
        except (EngineError, TimeoutError):
            if self._last_stats is None:
                raise
        assert self._last_stats is not None
        return self._last_stats

    def stats_future(self) -> "Future[EngineStats]":
        """Those of this moment, without waiting for them."""
        return self._call("stats")

    def audit(self) -> list[str]:
        return list(self._call("audit").result())

    def update_weights(
        self,
        parcels: Iterable[WeightUpdate],
        mode: PauseMode = "in_place",
        *,
        verify: bool = False,
        patience_s: float | None = None,
    ) -> None:
        """A whole version; returns when it serves. With `verify` every tensor is compared with
        what was sent. An engine that is not alive has it when it is again; one that lives and has
        not taken it within `patience_s` is an EngineFailed."""
        bundles = [FlattenedTensorBucket.from_update(parcel) for parcel in parcels]
        with self._pushing:
            self._newest = (bundles, mode, verify)
            if self.broken is None:
                try:
                    self._call("publish", *self._newest).result(patience_s)
                except TimeoutError:
                    version = bundles[0].version if bundles else "?"
                    raise EngineError(
                        f"the engine's process {self.pid} has not taken version {version} within"
                        f" {patience_s:g} s: it is stopped, or hangs"
                    ) from None
                except EngineError:
                    if self.broken is None:
                        raise

    async def check_health(self) -> bool:
        """Whether it answers."""
        try:
            return bool(await asyncio.wrap_future(self._call("beats")))
        except EngineError:
            return False

    @property
    def healthy(self) -> bool:
        return self.broken is None

    @property
    def pid(self) -> int:
        """Of the process there is now."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def gave_up(self) -> bool:
        """Whether no other process is started any more."""
        return self._failures >= MAX_RESTARTS

    def restart_async(self) -> None:
        """Start another process if this one is gone and none is on its way. Does not block."""
        if self.broken is None or self.gave_up or self._closed:
            return
        if self._reviving is None or not self._reviving.is_alive():
            self._reviving = Thread(target=self.restart, name="paddock-revive", daemon=True)
            self._reviving.start()

    def restart(self) -> None:
        """Start another process, and give it the newest weights."""
        self._end_process()
        try:
            self._begin()
        except Exception as error:
            self._failures += 1
            self._break(f"{error}")
            log.warning("an engine's process could not be started anew: %s", error)

    def close(self) -> None:
        """End every request and the process. Further requests are refused."""
        self._closed = True
        self._break("the engine was closed")
        self._end_process()

    # --- within -----------------------------------------------------------------------------------

    def _begin(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=run_engine_server, args=(theirs, self._build), name="paddock-engine", daemon=True
        )
        self._process.start()
        theirs.close()
        self._waiting: dict[int, OutputCallback] = {}
        self._out: list[SubmitMessage | AbortMessage | CallMessage] = []
        self._flushing = False
        self._outbox: SimpleQueue[list[Any] | None] = SimpleQueue()
        Thread(
            target=self._write,
            args=(self._pipe, self._outbox),
            name="paddock-pipe-out",
            daemon=True,
        ).start()
        try:
            born = self._pipe.recv()
        except (EOFError, OSError):
            born = EngineError(f"the engine's process {self._how_it_ended()} before it began")
        if isinstance(born, Exception):
            self._end_process()
            self.broken = str(born)
            raise born
        self.capacity: KVCacheConfig = born
        Thread(target=self._read, args=(self._pipe,), name="paddock-pipe", daemon=True).start()
        with self._pushing:
            if self._newest is not None:
                self._call("publish", *self._newest, unborn=True).result()
            with self._lock:
                self.broken = None
            if not self._process.is_alive():  # and was seen to die before that line
                raise EngineError(f"the engine's process {self._how_it_ended()}")
            self._failures = 0

    def _expect(self, key: int, deliver: OutputCallback, unborn: bool = False) -> None:
        with self._lock:
            if self.broken is not None and not unborn:
                if self.gave_up:
                    raise RuntimeError(
                        f"the engine's process died {MAX_RESTARTS} times: {self.broken}"
                    )
                raise EngineError(self.broken)
            self._waiting[key] = deliver

    def _call(self, what: str, *arguments: Any, unborn: bool = False) -> "Future[Any]":
        """A method of the child's; the future is set when it returns."""
        future: Future[Any] = Future()

        def deliver(found: Any) -> None:
            if not future.set_running_or_notify_cancel():
                return  # whoever called has lost patience
            if isinstance(found, Exception):
                future.set_exception(found)
            else:
                future.set_result(found.value)

        key = next(self._serial)
        self._expect(key, deliver, unborn)
        with self._lock:
            self._out.append(CallMessage(key, what, arguments))
        self._flush()  # at once: whoever calls may wait on an event loop's own thread
        return future

    def _post(self, message: SubmitMessage | AbortMessage) -> None:
        """What an event loop posts in one turn goes out together."""
        with self._lock:
            self._out.append(message)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._flush()
            return
        if not self._flushing:
            self._flushing = True
            loop.call_soon(self._flush)

    def _flush(self) -> None:
        with self._lock:
            self._flushing = False
            messages = list(self._out)
            self._out.clear()
            if messages:
                self._outbox.put(messages)

    def _write(self, pipe: Connection, outbox: "SimpleQueue[list[Any] | None]") -> None:
        """On a thread of its own: a process that stands still does not empty its pipe, and an
        event loop that waited for it would keep no deadline."""
        while True:
            messages = outbox.get()
            try:
                pipe.send(messages)
            except (OSError, ValueError):  # closed: whoever reads tells those who wait
                return
            if messages is None:
                return

    def _read(self, pipe: Connection) -> None:
        while True:
            try:
                arrived = pipe.recv()
            except (EOFError, OSError):
                break
            for key, found in arrived:
                over = not isinstance(found, OutputDelta) or found.output is not None
                with self._lock:
                    take = self._waiting.pop(key, None) if over else self._waiting.get(key)
                if take is not None and not _taken(take, found) and not over:
                    self.abort(str(key))
        if pipe is self._pipe and not self._closed:
            self._break(f"the engine's process {self._how_it_ended()}")

    def _break(self, why: str) -> None:
        with self._lock:
            self.broken = why
            waiting, self._waiting = self._waiting, {}
            self._out.clear()
        for take in waiting.values():
            _taken(take, EngineError(why))

    def _how_it_ended(self) -> str:
        self._process.join(EXIT_TIMEOUT_S)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with code {code}"

    def _end_process(self) -> None:
        self._outbox.put(None)  # closing is not heard there while this end is being read from
        self._process.join(EXIT_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(EXIT_TIMEOUT_S)
        self._pipe.close()


def _taken(take: OutputCallback, found: Any) -> bool:
    """A client that fails to take what it asked for is no reason for the others to suffer."""
    try:
        take(found)
    except Exception:
        log.exception("a client could not take what it was sent")
        return False
    return True
