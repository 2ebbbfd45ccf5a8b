"""Functions of others in processes of their own, which may hang, crash or eat memory there.

A worker is a process that imports one function and waits. A call runs in a copy of it (a fork): it
costs milliseconds, cannot change the next one, and what takes too long or dies takes nothing
along. Texts are hashed the same in every worker, so that what iterates over sets gives the same in
each.

A call's limit is CPU time, so that a busy machine fails nobody; the clock on the wall is only for
what does not even use that.

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
_MEMORY_BYTES = 1 << 30  # that a call may use on top of what the worker has
_MOST_BYTES = 16 << 20  # of a reply
_PATIENCE = 6  # seconds by the clock for each of CPU time
_QUICK_S = 0.5  # what takes longer no longer holds up others
_SLOW = 30  # calls that may take longer at the same time
_JAIL = (
    *("bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"),
    *("--unshare-all", "--die-with-parent", "--new-session"),
)


class WorkerError(Exception):
    """The function raised, or its process died."""


class WorkerLimitExceeded(WorkerError):
    """A call used up its time or its memory, or ended its process."""


class WorkerPool:
    """A process that calls `target` ("module:function"), started when needed, `count` calls at a
    time; one that is slow makes room for the next. May be used from any thread and from any event
    loop. `preload` is a module to import, or a "module:function" to call, before the first call: it
    takes its time outside the limits."""

    def __init__(self, target: str, *, count: int = 1, preload: str = "") -> None:
        self._command = (target, preload)
        self._running: list[_Process] = []
        self._lock = threading.Lock()
        self._quick = threading.Semaphore(count)
        self._threads = ThreadPoolExecutor(count + _SLOW, thread_name_prefix="paddock-worker")
        self._ended = weakref.finalize(self, _end, self._running, self._threads)

    async def call(self, *arguments: Any, seconds: float) -> Any:
        """What the function returns. WorkerError: it raised; Exhausted: it used more CPU time or
        memory than it may, or died."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._call, arguments, seconds)

    def call_blocking(self, *arguments: Any, seconds: float) -> Any:
        """The same for callers without an event loop, and in the worker itself: sooner, and for
        arguments that no model wrote."""
        return self._threads.submit(self._call, arguments, seconds, copied=False).result()

    async def call_with_control(
        self, *arguments: Any, control: tuple[Any, ...], seconds: float
    ) -> Any:
        """What a grader says of an answer; None if the answer itself brought the call down. To tell
        that from a grader that is broken, a `control` call is made, which must succeed whenever the
        grader works: WorkerError if it does not."""
        try:
            return await self.call(*arguments, seconds=seconds)
        except WorkerError:
            await self.call(*control, seconds=seconds)
            return None

    def close(self) -> None:
        self._ended()

    def _call(self, arguments: tuple[Any, ...], seconds: float, *, copied: bool = True) -> Any:
        reply = None
        for _ in range(2):
            with contextlib.ExitStack() as stack:
                with self._quick:
                    process = self._process()
                    call = stack.enter_context(process.call(arguments, seconds, copied))
                    call.wait(_QUICK_S)
                try:
                    reply = call.reply()
                except WorkerLimitExceeded:
                    if not process.ended():
                        raise
            if reply is not None or not copied:
                break  # else the whole worker was lost, by no fault of this call: the next is asked
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
                self._running.append(_Process(*self._command))
            return self._running[0]


@cache
def shared_pool(target: str, *, count: int = 1, preload: str = "") -> WorkerPool:
    """The workers of a target, the same for whoever asks alike: a hundred worlds, one process."""
    return WorkerPool(target, count=count, preload=preload)


def _end(running: "list[_Process]", threads: ThreadPoolExecutor) -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    while running:
        running.pop().end()


class _Call:
    """One call, from here: a pipe to which its process writes that it began, and its reply."""

    def __init__(self, target: str, out: int, seconds: float) -> None:
        self._target, self._out, self._seconds = target, out, seconds
        self._deadline = time.monotonic() + seconds * _PATIENCE + _START_S
        self._read, self._over = b"", False

    def wait(self, seconds: float) -> None:
        """For the reply, or so long."""
        until = min(self._deadline, time.monotonic() + seconds)
        while not self._over and len(self._read) <= _MOST_BYTES:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._out], [], [], left)[0]:
                return
            piece = os.read(self._out, 1 << 16)
            self._read += piece
            self._over = not piece

    def reply(self) -> dict[str, Any] | None:
        """None: the call never began."""
        self.wait(float("inf"))
        began, _, said = self._read.partition(b"\n")
        if self._over and not began:
            return None
        if len(said) > _MOST_BYTES:
            raise WorkerLimitExceeded(f"{self._target} returned over {_MOST_BYTES} bytes")
        if self._over and said:
            found: dict[str, Any] = json.loads(said)
            return found
        if not self._over:
            raise WorkerLimitExceeded(f"{self._target} does not end")
        raise WorkerLimitExceeded(
            f"{self._target}: its process died (over {self._seconds:g} s, or out of memory)"
        )

    def __enter__(self) -> "_Call":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)


class _Process:
    def __init__(self, target: str, preload: str) -> None:
        command = [sys.executable, "-m", "paddock.envs.worker_pool", target, preload]
        self._target = target
        self._turn = threading.Lock()
        jail = _JAIL if can_isolate() else ()
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._child = subprocess.Popen(
                [*jail, *command],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
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
            )
        try:
            self._line.settimeout(_START_S)
            said = self._line.recv(1 << 16)
        except BaseException:
            self.end()
            raise
        if said != b"ready":
            self.end()
            raise WorkerError(said.decode() or f"{target}: its process died")

    def call(self, arguments: tuple[Any, ...], seconds: float, copied: bool) -> _Call:
        text = json.dumps([seconds, arguments]).encode()
        request = os.memfd_create("call")  # as long as it is; a line has its limits
        out, theirs = os.pipe()
        try:
            with open(request, "wb", closefd=False) as file:
                file.write(text)
            with self._turn, contextlib.suppress(OSError):  # it is gone: the call never begins
                socket.send_fds(self._line, [b"copy" if copied else b"here"], [request, theirs])
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
    """Whether workers are jailed on this machine."""
    if not shutil.which("bwrap"):
        return False
    return subprocess.run([*_JAIL, "true"], capture_output=True, check=False).returncode == 0


def worker_main(target: str, preload: str) -> None:
    """A worker's whole life: import, then a copy of itself for each call, until there are none."""
    line = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)  # whatever reads here must not take a call away
    try:
        if preload:
            _preload(preload)
        module, _, name = target.partition(":")
        function = getattr(import_module(module), name)
    except Exception as error:
        line.send(f"{target}: {type(error).__name__}: {error}"[:1000].encode())
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    line.send(b"ready")
    while True:
        said, fds, _, _ = socket.recv_fds(line, 16, 2)
        if not said:
            os.killpg(0, signal.SIGKILL)  # calls that nobody waits for
        if said == b"here" or not os.fork():
            _one(target, function, *fds, copied=said == b"copy")
        for fd in fds:
            os.close(fd)


def _one(target: str, function: Any, request: int, out: int, *, copied: bool) -> None:
    """One call; a copy's whole life."""
    os.write(out, b"begun\n")
    with open(request, "rb", closefd=False) as file:
        file.seek(0)
        seconds, arguments = json.load(file)
    if copied:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with open("/proc/self/statm") as statm:
            most = int(statm.read().split()[0]) * resource.getpagesize() + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    # The signals of both clocks kill, also in the middle of one long multiplication.
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * _PATIENCE)
    try:
        reply = {"value": function(*arguments)}
    except BaseException as error:  # an answer that is evaluated may say exit()
        reply = {"error": f"{target}: {type(error).__name__}: {str(error)[:500]}"}
    with open(out, "w", closefd=False) as pipe:
        pipe.write(json.dumps(reply))
    if copied:
        os._exit(0)
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)


def _preload(name: str) -> None:
    module, _, function = name.partition(":")
    found = import_module(module)
    if function:
        getattr(found, function)()


if __name__ == "__main__":
    worker_main(*sys.argv[1:])
