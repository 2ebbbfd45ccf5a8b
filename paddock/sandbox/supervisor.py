"""Program that runs as the first process inside a sandbox and starts all others.

Started by `supervised.guest_command` with a socket as its standard input.

Requests, each in a frame (REQUEST: two lengths; a marshalled dict with `op`; bytes):

    spawn     id, argv, cwd, env, user, eof, head_bytes; bytes for stdin (`eof`: then close it)
    stdin     id, eof; bytes for stdin
    sync      id; answered by SYNCED once all output so far was sent
    kill      id, children; the job with its descendants, or only those started since the last
              write to stdin
    stop, resume, kill_all   all processes (stop and kill_all are answered by STOPPED)

Replies, each in a frame (REPLY: kind, id, number, lost and tail of stdout and of stderr, length;
then bytes): READY; STOPPED; OUTPUT of stream `number`; SYNCED; EXIT with code `number`. The bytes
of the last two are the tails of the streams. Of each stream `head_bytes` are passed on until the
next sync; after that only the last `tail_bytes` are kept and the dropped ones counted. When the
socket is closed, the supervisor exits, and with it every process of the sandbox.

Processes of the sandbox live in a nested user namespace: they cannot inspect or signal the
supervisor or undo its mounts. It imports nothing after its start, because they may have written
the files that it would load. Standard library only.
"""

from __future__ import annotations

import contextlib
import marshal  # built in, so no file is loaded; both ends run the same interpreter
import os
import selectors
import signal
import struct
import sys
import time

from paddock.sandbox.processes import descendants, exec_job, kill_tree
from paddock.sandbox.syscalls import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    make_user_namespace,
    prctl,
)

TYPE_CHECKING = False  # importing typing would slow the start down
if TYPE_CHECKING:
    from typing import Any

REQUEST, REPLY = struct.Struct(">II"), struct.Struct(">BIiQQIII")
READY, STOPPED, OUTPUT, SYNCED, EXIT = range(5)
CHUNK = 1 << 16
KILL_TIMEOUT_S = 5.0  # for processes to exit after SIGKILL
FLOOD_BYTES, FLOOD_PAUSE_S = 8 << 20, 0.01  # streams with more dropped bytes are throttled


class JobOutput:
    """One output stream of a job."""

    def __init__(
        self, job: SupervisedJob, number: int, fd: int, head_bytes: int, tail_bytes: int
    ) -> None:
        self.job, self.number, self.fd = job, number, fd
        self.head_bytes, self.tail_bytes = head_bytes, tail_bytes
        self.reset()

    def reset(self) -> None:
        self.remaining, self.lost, self.tail = self.head_bytes, 0, b""

    def split(self, data: bytes) -> bytes:
        """The part of new data to pass on; the rest goes to the tail."""
        passed, rest = data[: self.remaining], data[self.remaining :]
        self.remaining -= len(passed)
        if rest:
            tail = (self.tail + rest)[-self.tail_bytes :]
            self.lost += len(self.tail) + len(rest) - len(tail)
            self.tail = tail
        return passed


class SupervisedJob:
    """One process that was requested, with its pipes."""

    def __init__(self, name: int, pid: int, stdin: int, eof: bool, data: bytes) -> None:
        self.name, self.pid = name, pid
        self.stdin: int | None = stdin
        self.eof, self.pending = eof, bytearray(data)
        self.streams: dict[int, JobOutput] = {}
        self.before: set[int] = set()  # descendants at the last write to stdin


class ProcessSupervisor:
    """Serves requests from the control socket."""

    def __init__(self, control: int, settings: dict[str, Any]) -> None:
        self.control, self.settings = control, settings
        self.inbox = bytearray()
        self.jobs: dict[int, SupervisedJob] = {}
        self.paused: list[tuple[float, JobOutput]] = []
        self.selector = selectors.DefaultSelector()
        self.userns = None
        if settings["namespace"]:
            self.userns = inner_namespace(nesting=settings["namespaces"])
        wake_r, wake_w = os.pipe()
        for fd in (wake_r, wake_w):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(wake_r, selectors.EVENT_READ, "child")
        self.selector.register(control, selectors.EVENT_READ, "control")

    def serve(self) -> None:
        self.send(READY)
        while True:
            wait = max(0.0, self.paused[0][0] - time.monotonic()) if self.paused else None
            for key, _ in self.selector.select(wait):
                if key.data == "control":
                    if not self.handle_request():
                        return
                elif key.data == "child":
                    with contextlib.suppress(BlockingIOError):
                        os.read(key.fd, 512)
                    self.reap()
                elif isinstance(key.data, JobOutput):
                    self.forward_chunk(key.data)
                else:
                    self.write_stdin(key.data)
            while self.paused and self.paused[0][0] <= time.monotonic():
                stream = self.paused.pop(0)[1]
                self.selector.register(stream.fd, selectors.EVENT_READ, stream)

    def send(
        self,
        kind: int,
        job: int = 0,
        number: int = 0,
        counts: Any = (0, 0, 0, 0),
        data: bytes = b"",
    ) -> None:
        rest = REPLY.pack(kind, job, number, *counts, len(data)) + data
        while rest:
            rest = rest[os.write(self.control, rest) :]

    def handle_request(self) -> bool:
        """Serve the requests that have arrived; False when the control socket is closed."""
        data = os.read(self.control, 1 << 20)
        self.inbox += data
        while len(self.inbox) >= REQUEST.size:
            head, body = REQUEST.unpack_from(self.inbox)
            end = REQUEST.size + head + body
            if len(self.inbox) < end:
                break
            request = marshal.loads(bytes(self.inbox[REQUEST.size : REQUEST.size + head]))
            payload = bytes(self.inbox[REQUEST.size + head : end])
            del self.inbox[:end]
            handler = getattr(self, "do_" + request.pop("op"))
            handler(**request, **({"data": payload} if payload else {}))
        return bool(data)

    # Requests.

    def do_spawn(
        self, id: int, eof: bool, head_bytes: int | None, data: bytes = b"", **request: Any
    ) -> None:
        pipes = [os.pipe() for _ in range(3)]
        ours = (pipes[0][1], pipes[1][0], pipes[2][0])
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
        try:
            pid = os.fork()
        except OSError as error:
            for fd in (*ours, *theirs):
                os.close(fd)
            self.send(OUTPUT, id, 2, data=f"cannot start: {error}\n".encode())
            self.send(EXIT, id, 126)
            return
        if pid == 0:
            exec_job(theirs, self.settings, self.userns, request)
        for fd in theirs:
            os.close(fd)
        for fd in ours:
            os.set_blocking(fd, False)
        job = self.jobs[id] = SupervisedJob(id, pid, ours[0], eof, data)
        for number in (1, 2):
            head, tail = head_bytes or self.settings["head_bytes"], self.settings["tail_bytes"]
            stream = job.streams[number] = JobOutput(job, number, ours[number], head, tail)
            self.selector.register(stream.fd, selectors.EVENT_READ, stream)
        self.selector.register(ours[0], selectors.EVENT_WRITE, job)
        self.write_stdin(job)

    def do_stdin(self, id: int, eof: bool, data: bytes = b"") -> None:
        job = self.jobs.get(id)
        if job is None or job.stdin is None:
            return
        job.before = descendants({job.pid})
        idle = not job.pending
        job.pending += data
        job.eof |= eof
        if idle:
            self.selector.register(job.stdin, selectors.EVENT_WRITE, job)
            self.write_stdin(job)

    def do_sync(self, id: int) -> None:
        job = self.jobs.get(id)
        if job is not None:
            self.send(SYNCED, id, 0, self.drain_job(job), self.flush_tails(job))
            for stream in job.streams.values():
                stream.reset()

    def do_kill(self, id: int, children: bool) -> None:
        job = self.jobs.get(id)
        if job is not None:
            kill_tree({job.pid}, spared=job.before | {job.pid} if children else set())

    def do_stop(self) -> None:
        if os.getpid() == 1:  # elsewhere -1 would be every process of the machine
            for _ in range(2):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGSTOP)
        self.send(STOPPED)

    def do_kill_all(self) -> None:
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while time.monotonic() < deadline and not self.reap():
            if os.getpid() == 1:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
            else:
                kill_tree({os.getpid()}, spared={os.getpid()})
            time.sleep(0.002)
        self.send(STOPPED)

    def do_resume(self) -> None:
        if os.getpid() == 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGCONT)

    # Events.

    def write_stdin(self, job: SupervisedJob) -> None:
        if job.stdin is None:
            return
        try:
            while job.pending:
                del job.pending[: os.write(job.stdin, job.pending[:CHUNK])]
        except BlockingIOError:
            return
        except BrokenPipeError:
            job.pending.clear()
            job.eof = True
        self.selector.unregister(job.stdin)
        if job.eof:
            os.close(job.stdin)
            job.stdin = None

    def forward_chunk(self, stream: JobOutput) -> bool:
        """Forward one chunk of output; whether there may be more."""
        if stream.fd < 0:  # closed by another event of the same select
            return False
        try:
            data = os.read(stream.fd, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self.close_stream(stream)
            return False
        job = stream.job
        if job.name in self.jobs:  # else it has exited, and output of its descendants is dropped
            passed = stream.split(data)
            if passed:
                self.send(OUTPUT, job.name, stream.number, data=passed)
        else:
            stream.lost += len(data)
        if stream.lost > FLOOD_BYTES and self.selector.get_map().get(stream.fd):
            self.selector.unregister(stream.fd)
            self.paused.append((time.monotonic() + FLOOD_PAUSE_S, stream))
            return False
        return True

    def close_stream(self, stream: JobOutput) -> None:
        if stream.fd >= 0:
            if self.selector.get_map().get(stream.fd):
                self.selector.unregister(stream.fd)
            self.paused = [each for each in self.paused if each[1] is not stream]
            os.close(stream.fd)
            stream.fd = -1

    def drain_job(self, job: SupervisedJob) -> list[int]:
        """Forward what a job has written. Returns dropped bytes and tail sizes of its streams."""
        for stream in job.streams.values():
            chunks = 64  # more than a pipe holds; bounded, because descendants may go on writing
            while stream.fd >= 0 and chunks and self.forward_chunk(stream):
                chunks -= 1
        streams = job.streams.values()
        return [*(each.lost for each in streams), *(len(each.tail) for each in streams)]

    def flush_tails(self, job: SupervisedJob) -> bytes:
        return b"".join(stream.tail for stream in job.streams.values())

    def reap(self) -> bool:
        """Reap exited jobs and orphans; whether no child is left."""
        by_pid = {job.pid: job for job in self.jobs.values()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            job = by_pid.get(pid)
            if job is not None:
                self.on_exit(job, os.waitstatus_to_exitcode(status))

    def on_exit(self, job: SupervisedJob, code: int) -> None:
        counts = self.drain_job(job)
        code = 128 - code if code < 0 else code
        self.send(EXIT, job.name, code, counts, self.flush_tails(job))
        del self.jobs[job.name]
        if job.stdin is not None:
            if self.selector.get_map().get(job.stdin):
                self.selector.unregister(job.stdin)
            os.close(job.stdin)
            job.stdin = None


def inner_namespace(*, nesting: bool) -> int:
    """A user namespace with all the ids of this one, as a descriptor.

    Without `nesting` no further one can be made in it: with capabilities in their own namespace,
    processes would reach far more of the kernel.
    """
    with open("/proc/self/uid_map") as file:
        ids = file.read().split()[2]
    inner = make_user_namespace(f"0 0 {ids}")
    if nesting:
        return inner
    with contextlib.suppress(OSError), open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("1")
    return inner


def silence_traceback(*_: object) -> None:
    """Exit without a traceback, which would load files that the sandbox may have written."""
    os._exit(70)


def main(settings: dict[str, Any]) -> None:
    control = os.dup(0)
    nothing = os.open("/dev/null", os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # the kernel does not deliver them to pid 1 then
    for fd in settings["cgroups"]:
        os.set_inheritable(fd, False)  # only `exec_job` may use them
    prctl(PR_SET_DUMPABLE, 0)
    sys.excepthook = silence_traceback
    if os.getpid() == 1:
        with contextlib.suppress(OSError), open(settings["low_ports"], "w") as file:
            file.write("0")  # no process inside has capabilities in the network namespace
    else:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        ProcessSupervisor(control, settings).serve()
    except (BrokenPipeError, ConnectionResetError):
        pass
    finally:
        if os.getpid() != 1:
            kill_tree({os.getpid()}, spared={os.getpid()})
