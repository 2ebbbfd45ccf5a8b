"""Worker processes for third-party functions that may hang, crash or exhaust memory.

A worker imports one function and waits. Each call runs in a fork of it, which costs milliseconds,
cannot affect later calls, and can be killed. PYTHONHASHSEED is fixed, so that iteration over sets
is the same in every worker.

Calls are limited in CPU time, so that a busy machine causes no failures; the wall-clock limit is
only for calls that use no CPU.

If bubblewrap works, a worker has a read-only file system, no network and its own process namespace:
verifiers read what a model wrote, and some evaluate it.
"""

import asyncio
import contextlib
import json
import os
import resource
import select
import shutil
import signal
import socket
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
_MEMORY_BYTES = 1 << 30  # for a call, on top of the worker's own
_MAX_REPLY_BYTES = 16 << 20
_WALL_PER_CPU = 6  # wall-clock seconds per second of CPU time
_QUICK_S = 0.5  # calls that take longer give up their slot
_MAX_SLOW = 30  # concurrent calls that take longer
_BWRAP = (
    *("bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"),
    *("--unshare-all", "--die-with-parent", "--new-session"),
)


class WorkerError(Exception):
    """The function raised, or its process died."""


class WorkerLimitExceeded(WorkerError):
    """A call exceeded its time or memory, or exited its process."""


class WorkerPool:
    """A process that calls `target` ("module:function"), started on first use, with `count` calls
    at a time; a slow call gives up its slot. Usable from any thread and event loop. `preload` is a
    module to import, or a "module:function" to call with the strings that follow, before the first
    call and outside its limits. `network`: not isolated from it."""

    def __init__(
        self, target: str, *, count: int = 1, preload: tuple[str, ...] = (), network: bool = False
    ) -> None:
        self._command, self._network = (target, *preload), network
        self._running: list[_Process] = []
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(count)
        self._threads = ThreadPoolExecutor(count + _MAX_SLOW, thread_name_prefix="paddock-worker")
        self._ended = weakref.finalize(self, _end, self._running, self._threads)

    async def call(self, *arguments: Any, seconds: float) -> Any:
        """The function's result. Raises WorkerError if it raised, WorkerLimitExceeded if it
        exceeded its CPU time or memory or its process died."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._call, arguments, seconds)

    def call_blocking(self, *arguments: Any, seconds: float) -> Any:
        """The same without an event loop, and without a fork: faster, but only for arguments that
        no model wrote."""
        return self._threads.submit(self._call, arguments, seconds, forked=False).result()

    async def call_with_control(
        self, *arguments: Any, control: tuple[Any, ...], seconds: float
    ) -> Any:
        """The verifier's result for an answer; None if the answer made the call fail. After a
        failure a `control` call, which a working verifier must pass, tells a bad answer from a
        broken verifier: WorkerError if it fails too."""
        try:
            return await self.call(*arguments, seconds=seconds)
        except WorkerError:
            await self.call(*control, seconds=seconds)
            return None

    def close(self) -> None:
        self._ended()

    def _call(self, arguments: tuple[Any, ...], seconds: float, *, forked: bool = True) -> Any:
        reply = None
        for _ in range(2):
            with contextlib.ExitStack() as stack:
                with self._slots:
                    process = self._process()
                    call = stack.enter_context(process.call(arguments, seconds, forked))
                    call.wait(_QUICK_S)
                try:
                    reply = call.reply()
                except WorkerLimitExceeded:
                    if not process.ended():
                        raise
            if reply is not None or not forked:
                break  # else the whole worker was lost, not through this call: retry on a new one
        if reply is None:
            raise WorkerLimitExceeded(f"{self._command[0]}: its process died")
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply["value"]

    def _process(self) -> "_Process":
        with self._lock:
            if self._running and self._running[0].ended():
                self._running.pop().end()
            if not self._running:
                self._running.append(_Process(self._command, self._network))
            return self._running[0]


@cache
def shared_pool(
    target: str, *, count: int = 1, preload: tuple[str, ...] = (), network: bool = False
) -> WorkerPool:
    """A pool shared by all callers with the same arguments: many environments, one process."""
    return WorkerPool(target, count=count, preload=preload, network=network)


def _end(running: "list[_Process]", threads: ThreadPoolExecutor) -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    while running:
        running.pop().end()


class _Call:
    """Parent side of one call: a pipe on which the process reports its start and its reply."""

    def __init__(self, target: str, out: int, seconds: float) -> None:
        self._target, self._out, self._seconds = target, out, seconds
        self._deadline = time.monotonic() + seconds * _WALL_PER_CPU + _START_S
        self._read, self._over = b"", False

    def wait(self, seconds: float) -> None:
        """Wait for the reply, at most this long."""
        until = min(self._deadline, time.monotonic() + seconds)
        while not self._over and len(self._read) <= _MAX_REPLY_BYTES:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._out], [], [], left)[0]:
                return
            piece = os.read(self._out, 1 << 16)
            self._read += piece
            self._over = not piece

    def reply(self) -> dict[str, Any] | None:
        """The reply; None if the call never started."""
        self.wait(float("inf"))
        started, _, reply = self._read.partition(b"\n")
        if self._over and not started:
            return None
        if len(reply) > _MAX_REPLY_BYTES:
            raise WorkerLimitExceeded(f"{self._target} returned over {_MAX_REPLY_BYTES} bytes")
        if self._over and reply:
            found: dict[str, Any] = json.loads(reply)
            return found
        if not self._over:
            raise WorkerLimitExceeded(f"{self._target} did not finish in time")
        raise WorkerLimitExceeded(
            f"{self._target}: its process died (over {self._seconds:g} s, or out of memory)"
        )

    def __enter__(self) -> "_Call":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)


class _Process:
    def __init__(self, call: tuple[str, ...], network: bool) -> None:
        command = [sys.executable, "-m", "paddock.envs.worker_pool", *call]
        self._target = target = call[0]
        self._turn = threading.Lock()
        isolation = (*_BWRAP, *(["--share-net"] if network else [])) if can_isolate() else ()
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._child = subprocess.Popen(
                [*isolation, *command],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={
                    "PATH": os.defpath,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    "PYTHONHASHSEED": "0",
                    "OMP_NUM_THREADS": "1",
                    # Some libraries need a writable folder; inside bubblewrap this is one.
                    **(dict.fromkeys(("TMPDIR", "MPLCONFIGDIR"), "/dev/shm") if isolation else {}),
                },
                start_new_session=True,
            )
        try:
            self._line.settimeout(_START_S)
            status = self._line.recv(1 << 16)
        except BaseException:
            self.end()
            raise
        if status != b"ready":
            self.end()
            raise WorkerError(status.decode() or f"{target}: its process died")

    def call(self, arguments: tuple[Any, ...], seconds: float, forked: bool) -> _Call:
        text = json.dumps([seconds, arguments]).encode()
        request = os.memfd_create("call")  # of any length; socket messages are limited
        out, theirs = os.pipe()
        try:
            with open(request, "wb", closefd=False) as file:
                file.write(text)
            with (
                self._turn,
                contextlib.suppress(OSError),
            ):  # the worker is gone: the call never starts
                socket.send_fds(self._line, [b"copy" if forked else b"here"], [request, theirs])
        finally:
            os.close(request)
            os.close(theirs)
        return _Call(self._target, out, seconds)

    def ended(self) -> bool:
        return self._child.poll() is not None

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._line.close()
        self._child.wait()


@cache
def can_isolate() -> bool:
    """Whether bubblewrap works on this machine, so that workers are isolated."""
    if not shutil.which("bwrap"):
        return False
    return subprocess.run([*_BWRAP, "true"], capture_output=True, check=False).returncode == 0


def worker_main(target: str, *preload: str) -> None:
    """Entry point of a worker: import the function, then fork per call until the pool closes."""
    line = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)  # code that reads stdin must not consume calls
    try:
        if preload:
            _preload(*preload)
        module, _, name = target.partition(":")
        function = getattr(import_module(module), name)
    except Exception as error:
        line.send(f"{target}: {type(error).__name__}: {error}"[:1000].encode())
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap children automatically
    line.send(b"ready")
    while True:
        command, fds, _, _ = socket.recv_fds(line, 16, 2)
        if not command:
            os.killpg(0, signal.SIGKILL)  # calls without a waiting parent
        if command == b"here" or not os.fork():
            _run_call(target, function, *fds, forked=command == b"copy")
        for fd in fds:
            os.close(fd)


def _run_call(target: str, function: Any, request: int, out: int, *, forked: bool) -> None:
    """Run one call; a fork exits afterwards."""
    os.write(out, b"begun\n")
    with open(request, "rb", closefd=False) as file:
        file.seek(0)
        seconds, arguments = json.load(file)
    if forked:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with open("/proc/self/statm") as statm:
            limit = int(statm.read().split()[0]) * resource.getpagesize() + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # The default action of both signals kills, even within one long multiplication.
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * _WALL_PER_CPU)
    try:
        reply = {"value": function(*arguments)}
    except BaseException as error:  # an evaluated answer may call exit()
        reply = {"error": f"{target}: {type(error).__name__}: {str(error)[:500]}"}
    with open(out, "w", closefd=False) as pipe:
        pipe.write(json.dumps(reply))
    if forked:
        os._exit(0)
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)


def _preload(name: str, *arguments: str) -> None:
    module, _, function = name.partition(":")
    found = import_module(module)
    if function:
        getattr(found, function)(*arguments)


if __name__ == "__main__":
    worker_main(*sys.argv[1:])
