"""Functions of others in a process of their own, which may hang, crash or eat memory there.

A worker imports one function and calls it with JSON values, line by line. What takes too long is
killed with its process; the next call starts a new one. A call `apart` runs in a copy of the
process and cannot change the next. Texts are hashed the same in every worker, so that what iterates
over sets gives the same in each.

Where bubblewrap is there, a worker sees the file system read-only, no network and no process but
its own: graders read what a model wrote, and some of them evaluate it.
"""

import asyncio
import contextlib
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from typing import Any

_START_S = 120.0  # importing a large library on a busy machine
_MEMORY_BYTES = 4 << 30
_JAIL = (
    *("bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"),
    *("--unshare-all", "--die-with-parent", "--new-session"),
)


class WorkerError(Exception):
    """The function raised, or its process died."""


class Workers:
    """Up to `count` processes that call `target` ("module:function"), started when needed. May be
    used from any thread and from any event loop. `preload` is a module to import, or a
    "module:function" to call, before the first call: it takes its time outside the limits."""

    def __init__(self, target: str, *, count: int = 1, preload: str = "") -> None:
        self._command = (target, preload)
        self._idle: list[_Process] = []
        self._lock = threading.Lock()
        # A thread for each process: calls beyond them wait in the queue and hold nothing.
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="paddock-worker")
        self._ended = weakref.finalize(self, _end, self._idle, self._threads)

    async def call(self, *arguments: Any, seconds: float, apart: bool = False) -> Any:
        """What the function returns. TimeoutError: it took longer than that, waiting for a free
        process apart. WorkerError: it raised or died."""
        loop = asyncio.get_running_loop()
        order = (apart, arguments)
        return await loop.run_in_executor(self._threads, self._call, order, seconds)

    def call_now(self, *arguments: Any, seconds: float) -> Any:
        """The same for callers without an event loop."""
        return self._threads.submit(self._call, (False, arguments), seconds).result()

    def close(self) -> None:
        self._ended()

    def _call(self, order: tuple[bool, tuple[Any, ...]], seconds: float) -> Any:
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is None or process.ended():
            process = _Process(*self._command)
        try:
            reply = process.ask(order, seconds)
        except BaseException:
            process.end()
            raise
        with self._lock:
            self._idle.append(process)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply["value"]


@cache
def shared(target: str, *, count: int = 1, preload: str = "") -> Workers:
    """The workers of a target, the same for whoever asks alike: a hundred worlds, one process."""
    return Workers(target, count=count, preload=preload)


def _end(idle: "list[_Process]", threads: ThreadPoolExecutor) -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    while idle:
        idle.pop().end()


class _Process:
    def __init__(self, target: str, preload: str) -> None:
        command = [sys.executable, "-m", "paddock.envs.worker", target, preload]
        self._target = target
        jail = _JAIL if jail_works() else ()
        self._child = subprocess.Popen(
            [*jail, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={
                "PATH": os.defpath,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "PYTHONHASHSEED": "0",
                "OMP_NUM_THREADS": "1",
                # Some libraries insist on a place to write; the jail's own is this.
                **(dict.fromkeys(("TMPDIR", "MPLCONFIGDIR"), "/dev/shm") if jail else {}),
            },
            start_new_session=True,
            bufsize=0,
        )
        self._read = b""
        try:
            ready = self._line(time.monotonic() + _START_S)
        except BaseException:
            self.end()
            raise
        if "error" in ready:
            self.end()
            raise WorkerError(ready["error"])

    def ask(self, order: tuple[bool, tuple[Any, ...]], seconds: float) -> dict[str, Any]:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(order).encode() + b"\n")
        except BrokenPipeError:
            raise WorkerError(f"{self._target}: its process died") from None
        try:
            return self._line(time.monotonic() + seconds)
        except TimeoutError:
            raise TimeoutError(f"{self._target} took over {seconds:g} s") from None

    def _line(self, deadline: float) -> dict[str, Any]:
        assert self._child.stdout is not None
        while b"\n" not in self._read:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._child.stdout], [], [], left)[0]:
                raise TimeoutError
            piece = os.read(self._child.stdout.fileno(), 1 << 16)
            if not piece:
                self._child.wait()
                raise WorkerError(f"{self._target}: its process died ({self._child.returncode})")
            self._read += piece
        line, _, self._read = self._read.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def ended(self) -> bool:
        return self._child.poll() is not None

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            pipe.close()
        self._child.wait()


@cache
def jail_works() -> bool:
    """Whether workers are jailed on this machine."""
    if not shutil.which("bwrap"):
        return False
    return subprocess.run([*_JAIL, "true"], capture_output=True, check=False).returncode == 0


def serve(target: str, preload: str) -> None:
    """A worker's whole life: import, then a line out for each line in, until there are no more."""
    out = os.dup(1)
    os.dup2(2, 1)  # what the library prints must not be taken for an answer
    try:
        if preload:
            _preload(preload)
        module, _, name = target.partition(":")
        function = getattr(import_module(module), name)
    except Exception as error:
        _say(out, {"error": f"{target}: {type(error).__name__}: {error}"})
        return
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    _say(out, {"value": "ready"})
    for line in sys.stdin:
        apart, arguments = json.loads(line)
        if apart and (child := os.fork()):
            _, status = os.waitpid(child, 0)
            if status:
                _say(out, {"error": f"{target}: its process died ({status})"})
            continue
        try:
            reply = {"value": function(*arguments)}
        except Exception as error:
            reply = {"error": f"{target}: {type(error).__name__}: {str(error)[:500]}"}
        _say(out, reply)
        if apart:
            os._exit(0)


def _preload(name: str) -> None:
    module, _, function = name.partition(":")
    found = import_module(module)
    if function:
        getattr(found, function)()


def _say(out: int, reply: dict[str, Any]) -> None:
    with os.fdopen(os.dup(out), "w") as pipe:  # whole, however long
        pipe.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    serve(*sys.argv[1:])
