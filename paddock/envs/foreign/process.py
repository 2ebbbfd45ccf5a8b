"""A process that speaks JSON lines: calls to its standard input, results from its output.

    {"call": 1, "method": "start", "params": {...}}
    {"call": 1, "result": ...}   or   {"call": 1, "error": "..."}

Calls may overlap, and come from any thread and event loop.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from tempfile import TemporaryFile
from typing import Any, TextIO

_MAX_LOG_BYTES = 1000
_END_S = 10.0  # for what it has started itself


class ForeignError(Exception):
    """The process reported an error, or ended."""


class ForeignProcess:
    """Started at once, ended with this object. After its end every call raises ForeignError with
    its last words."""

    def __init__(self, command: Sequence[str]) -> None:
        log = TemporaryFile("w+")  # noqa: SIM115  lives as long as the process
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        self._calls = _Calls(self._child, log)
        # A daemon thread: it must not keep this process alive.
        threading.Thread(target=self._calls.read, name="paddock-foreign", daemon=True).start()
        weakref.finalize(self, _end, self._child)

    def call_blocking(self, method: str, **params: Any) -> Any:
        return self._calls.send(method, params).result()

    async def call(self, method: str, **params: Any) -> Any:
        return await asyncio.wrap_future(self._calls.send(method, params))

    @property
    def ended(self) -> bool:
        return self._child.poll() is not None


class _Calls:
    """Calls without a result yet."""

    def __init__(self, child: "subprocess.Popen[str]", log: TextIO) -> None:
        self._child, self._log = child, log
        self._waiting: dict[int, Future[Any]] = {}
        self._last = 0
        self._lock = threading.Lock()

    def send(self, method: str, params: dict[str, Any]) -> "Future[Any]":
        future: Future[Any] = Future()
        with self._lock:
            self._last += 1
            self._waiting[self._last] = future
            line = json.dumps({"call": self._last, "method": method, "params": params})
            try:
                assert self._child.stdin is not None
                self._child.stdin.write(line + "\n")
                self._child.stdin.flush()
            except OSError:
                self._fail_all()
        return future

    def read(self) -> None:
        """Deliver results until the output ends."""
        assert self._child.stdout is not None
        for line in self._child.stdout:
            found = json.loads(line)
            with self._lock:
                future = self._waiting.pop(found["call"], None)
            if future is None or not future.set_running_or_notify_cancel():
                continue
            if "error" in found:
                future.set_exception(ForeignError(found["error"]))
            else:
                future.set_result(found["result"])
        self._child.wait()
        with self._lock:
            self._fail_all()

    def _fail_all(self) -> None:
        file = self._log.fileno()
        start = max(0, os.fstat(file).st_size - _MAX_LOG_BYTES)
        text = os.pread(file, _MAX_LOG_BYTES, start).decode(errors="replace").strip()
        error = ForeignError(f"its process ended; it wrote: {text}")
        while self._waiting:
            _, future = self._waiting.popitem()
            if future.set_running_or_notify_cancel():
                future.set_exception(error)


def _end(child: "subprocess.Popen[str]") -> None:
    """Let it end what it has started; then kill it."""
    with contextlib.suppress(OSError):
        assert child.stdin is not None
        child.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_END_S)
    child.kill()
