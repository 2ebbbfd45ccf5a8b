"""SubprocessEngine: an engine in a child process, so that it does not share the trainer's GIL.

It has the interface of `Engine`. Messages are pickled in batches over a pipe that only the two
processes can reach. Weights do not go through the pipe but through shared memory, or the
accelerator's memory by IPC handles.

A process that exits is noticed at once; its requests fail with `EngineError`. `restart` starts
another process, which receives the newest weights before it accepts requests.
"""

import asyncio
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import count
from logging import getLogger
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Lock, Thread, current_thread
from typing import Any

import torch.multiprocessing as multiprocessing  # sends tensors by reference

from paddock.checkpoint import WeightUpdate
from paddock.engine.engine import Engine
from paddock.engine.engine_loop import PauseMode
from paddock.engine.request import EngineError, OutputCallback, OutputDelta, Request
from paddock.engine.settings import KVCacheConfig
from paddock.engine.stats import EngineStats
from paddock.engine.stream_bridge import StreamBridge
from paddock.engine.subprocess_server import (
    AbortMessage,
    CallMessage,
    FlattenedTensorBucket,
    SubmitMessage,
    run_engine_server,
)

log = getLogger("paddock.engine")

EXIT_TIMEOUT_S = 10.0  # for the process to exit by itself
STATS_TIMEOUT_S = 5.0  # for a reply to `stats`
MAX_RESTARTS = 3  # consecutive failed starts before giving up


class SubprocessEngine(StreamBridge):
    """`build` creates the engine in the child: a picklable function or a partial of one. The
    constructor returns when the engine is ready and raises EngineError if it cannot start."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        super().__init__()
        self._build = build
        self._serial = count()
        self._lock = Lock()  # of the callbacks and the outgoing messages
        self._weights_lock = Lock()  # of the newest weights
        self._newest: tuple[list[FlattenedTensorBucket], PauseMode, bool] | None = None
        self._last_stats: EngineStats | None = None
        self._failures = 0
        self._restart_thread: Thread | None = None
        self._closed = False
        self.broken: str | None = "the engine has not started"
        self._start()

    # --- generation -------------------------------------------------------------------------------

    def submit(self, request: Request, deliver: OutputCallback, *, streamed: bool = False) -> str:
        key = next(self._serial)
        self._expect(key, deliver)
        self._post(SubmitMessage(key, request, streamed))
        return str(key)

    def abort(self, request_id: str) -> None:
        """End a request that `submit` returned the id of."""
        with self._lock:
            callback = self._callbacks.pop(int(request_id), None)
        if callback is not None:
            self._post(AbortMessage(int(request_id)))

    # --- control ----------------------------------------------------------------------------------

    def pause(self, mode: PauseMode = "abort") -> None:
        self._call("pause", mode).result()

    def resume(self) -> None:
        self._call("resume").result()

    def stats(self) -> EngineStats:
        """Current statistics; the last known ones while the process is down or does not answer."""
        try:
            self._last_stats = self._call("stats").result(STATS_TIMEOUT_S)
        except (EngineError, TimeoutError):
            if self._last_stats is None:
                raise
        assert self._last_stats is not None
        return self._last_stats

    def stats_future(self) -> "Future[EngineStats]":
        """Current statistics, without blocking."""
        return self._call("stats")

    def audit(self) -> list[str]:
        return list(self._call("audit").result())

    def update_weights(
        self,
        updates: Iterable[WeightUpdate],
        mode: PauseMode = "in_place",
        *,
        verify: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Weight update with a full version; returns when it is in service. With `verify` every
        tensor is compared with what was sent. If the process is down, it gets the weights when it
        restarts; if it does not apply them within `timeout_s`, this raises EngineError."""
        buckets = [FlattenedTensorBucket.from_update(update) for update in updates]
        with self._weights_lock:
            self._newest = (buckets, mode, verify)
            if self.broken is None:
                try:
                    self._call("update_weights", *self._newest).result(timeout_s)
                except TimeoutError:
                    version = buckets[0].version if buckets else "?"
                    raise EngineError(
                        f"engine process {self.pid} has not applied weight version {version} within"
                        f" {timeout_s:g} s: it is stopped or hangs"
                    ) from None
                except EngineError:
                    if self.broken is None:
                        raise

    async def check_health(self) -> bool:
        """Whether the process answers and is healthy."""
        try:
            return bool(await asyncio.wrap_future(self._call("check_health")))
        except EngineError:
            return False

    @property
    def healthy(self) -> bool:
        return self.broken is None

    @property
    def pid(self) -> int:
        """Process id of the child."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def gave_up(self) -> bool:
        """Whether MAX_RESTARTS starts failed in a row, after which none is tried."""
        return self._failures >= MAX_RESTARTS

    def restart_async(self) -> None:
        """Restart the process in the background if it is down. Does not block."""
        if self.broken is None or self.gave_up or self._closed:
            return
        if self._restart_thread is None or not self._restart_thread.is_alive():
            self._restart_thread = Thread(target=self.restart, name="paddock-restart", daemon=True)
            self._restart_thread.start()

    def restart(self) -> None:
        """Start a new process and send it the newest weights."""
        self._end_process()
        try:
            self._start()
        except Exception as error:
            self._failures += 1
            self._break(f"{error}")
            log.warning("could not restart the engine process: %s", error)

    def close(self) -> None:
        """End all requests and the process. Further requests are rejected."""
        self._closed = True
        self._break("the engine was closed")
        self._end_process()

    # --- internals --------------------------------------------------------------------------------

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(
            target=run_engine_server,
            args=(child_pipe, self._build),
            name="paddock-engine",
            daemon=True,
        )
        self._process.start()
        child_pipe.close()
        self._callbacks: dict[int, OutputCallback] = {}
        self._out: list[SubmitMessage | AbortMessage | CallMessage] = []
        self._flushing = False
        self._outbox: SimpleQueue[list[Any] | None] = SimpleQueue()
        self._pipe_threads = [self._pipe_thread(self._write, self._pipe, self._outbox)]
        try:
            ready = self._pipe.recv()
        except (EOFError, OSError):
            ready = EngineError(f"the engine process {self._exit_reason()} before it was ready")
        if isinstance(ready, Exception):
            self._end_process()
            self.broken = str(ready)
            raise ready
        self.capacity: KVCacheConfig = ready
        self._pipe_threads.append(self._pipe_thread(self._read, self._pipe))
        with self._weights_lock:
            if self._newest is not None:
                self._call("update_weights", *self._newest, starting=True).result()
            with self._lock:
                self.broken = None
            if not self._process.is_alive():  # exited before `broken` was reset
                raise EngineError(f"the engine process {self._exit_reason()}")
            self._failures = 0

    @staticmethod
    def _pipe_thread(target: Callable[..., None], *arguments: Any) -> Thread:
        thread = Thread(target=target, args=arguments, name="paddock-pipe", daemon=True)
        thread.start()
        return thread

    def _expect(self, key: int, deliver: OutputCallback, starting: bool = False) -> None:
        with self._lock:
            if self.broken is not None and not starting:
                if self.gave_up:
                    raise RuntimeError(
                        f"the engine process failed to start {MAX_RESTARTS} times: {self.broken}"
                    )
                raise EngineError(self.broken)
            self._callbacks[key] = deliver

    def _call(self, method: str, *arguments: Any, starting: bool = False) -> "Future[Any]":
        """Call a method of the child's EngineServer; the future gets its result."""
        future: Future[Any] = Future()

        def deliver(found: Any) -> None:
            if not future.set_running_or_notify_cancel():
                return  # the caller has given up
            if isinstance(found, Exception):
                future.set_exception(found)
            else:
                future.set_result(found.value)

        key = next(self._serial)
        self._expect(key, deliver, starting)
        with self._lock:
            self._out.append(CallMessage(key, method, arguments))
        self._flush()  # at once: the caller may block the event loop's thread
        return future

    def _post(self, message: SubmitMessage | AbortMessage) -> None:
        """Queue a message; messages of one event-loop iteration are sent together."""
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
        """Send on a separate thread: a stopped process does not drain its pipe, and an event loop
        that blocked on it would miss its deadlines."""
        while True:
            messages = outbox.get()
            try:
                pipe.send(messages)
            except (OSError, ValueError):  # closed: the reader thread fails the pending requests
                return
            if messages is None:
                return

    def _read(self, pipe: Connection) -> None:
        while True:
            try:
                received = pipe.recv()
            except (EOFError, OSError):
                break
            for key, found in received:
                last = not isinstance(found, OutputDelta) or found.output is not None
                with self._lock:
                    callback = self._callbacks.pop(key, None) if last else self._callbacks.get(key)
                if callback is not None and not _deliver(callback, found) and not last:
                    self.abort(str(key))
        if pipe is self._pipe and not self._closed:
            self._break(f"the engine process {self._exit_reason()}")

    def _break(self, why: str) -> None:
        with self._lock:
            self.broken = why
            callbacks, self._callbacks = self._callbacks, {}
            self._out.clear()
        for callback in callbacks.values():
            _deliver(callback, EngineError(why))

    def _exit_reason(self) -> str:
        self._process.join(EXIT_TIMEOUT_S)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def _end_process(self) -> None:
        self._outbox.put(None)  # the child does not see a close while this end is being read
        self._process.join(EXIT_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(EXIT_TIMEOUT_S)
        # A thread that is still in the pipe when it is closed would read or write whatever gets
        # the same file descriptor next: the pipe of the restarted process.
        for thread in self._pipe_threads:
            if thread is not current_thread():
                thread.join(EXIT_TIMEOUT_S)
        self._pipe.close()


def _deliver(callback: OutputCallback, found: Any) -> bool:
    """Call the callback; False if it raises, which must not affect other requests."""
    try:
        callback(found)
    except Exception:
        log.exception("the output callback raised")
        return False
    return True
