"""A program of its own: the first process inside a sandbox, which starts all others.

`running.command` says how it is run. A socket is its standard input.

What it is asked for, each in a frame (ASK: two lengths; a marshalled table; bytes):

    spawn  id, argv, cwd, env, user, last, room; bytes: standard input (`last`: and no more of it)
    feed   id, last; bytes for standard input
    sync   id; answered by SYNCED once all that was written is on its way
    kill   id, children; the job with what it started, or only what it started since the last feed
    stop, go, end   all processes (stop and end are answered by STOPPED)

What it says, each in a frame (SAY: what, id, number, lost and tail of stdout and of stderr,
length; then bytes): READY, STOPPED; OUT of stream `number`; SYNCED; EXIT with code `number`. The
bytes of the last two are what was written last. Of each stream `room` bytes are passed on until the
next sync; then only the last `tail` bytes are kept and `lost` are counted. When the socket ends, so
does it, and with it every process of the sandbox.

Processes of the sandbox live in a user namespace below this one: they can neither see into nor
signal it, nor undo its mounts. It loads nothing after its start, because files that it would load
may have been written by them. Standard library only.
"""

from __future__ import annotations

import contextlib
import marshal  # of our own making, by the same interpreter; and it is there without loading files
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

TYPE_CHECKING = False  # the module typing takes long to load
if TYPE_CHECKING:
    from typing import Any

ASK, SAY = struct.Struct(">II"), struct.Struct(">BIiQQIII")
READY, STOPPED, OUT, SYNCED, EXIT = range(5)
CHUNK = 1 << 16
END_S = 5.0  # for processes to die once they are killed
FLOOD_BYTES, FLOOD_REST_S = 8 << 20, 0.01  # whoever wrote more than that in vain is slowed down


class JobOutput:
    """One output of a job."""

    def __init__(self, job: SupervisedJob, number: int, fd: int, room: int, tail: int) -> None:
        self.job, self.number, self.fd = job, number, fd
        self.most, self.tail_bytes = room, tail
        self.reset()

    def reset(self) -> None:
        self.room, self.lost, self.tail = self.most, 0, b""

    def split(self, data: bytes) -> bytes:
        """What may be passed on of new data; the rest is remembered as the tail."""
        passed, rest = data[: self.room], data[self.room :]
        self.room -= len(passed)
        if rest:
            kept = (self.tail + rest)[-self.tail_bytes :]
            self.lost += len(self.tail) + len(rest) - len(kept)
            self.tail = kept
        return passed


class SupervisedJob:
    def __init__(self, name: int, pid: int, stdin: int, last: bool, data: bytes) -> None:
        self.name, self.pid = name, pid
        self.stdin: int | None = stdin
        self.last, self.pending = last, bytearray(data)
        self.streams: dict[int, JobOutput] = {}
        self.before: set[int] = set()  # what it had started when it was last fed


class ProcessSupervisor:
    def __init__(self, control: int, settings: dict[str, Any]) -> None:
        self.control, self.settings = control, settings
        self.inbox = bytearray()
        self.jobs: dict[int, SupervisedJob] = {}
        self.resting: list[tuple[float, JobOutput]] = []
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
            wait = max(0.0, self.resting[0][0] - time.monotonic()) if self.resting else None
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
            while self.resting and self.resting[0][0] <= time.monotonic():
                stream = self.resting.pop(0)[1]
                self.selector.register(stream.fd, selectors.EVENT_READ, stream)

    def send(
        self,
        what: int,
        job: int = 0,
        number: int = 0,
        counts: Any = (0, 0, 0, 0),
        data: bytes = b"",
    ) -> None:
        rest = SAY.pack(what, job, number, *counts, len(data)) + data
        while rest:
            rest = rest[os.write(self.control, rest) :]

    def handle_request(self) -> bool:
        """Do what was asked for; False when there is nobody left to ask."""
        data = os.read(self.control, 1 << 20)
        self.inbox += data
        while len(self.inbox) >= ASK.size:
            head, body = ASK.unpack_from(self.inbox)
            end = ASK.size + head + body
            if len(self.inbox) < end:
                break
            asked = marshal.loads(bytes(self.inbox[ASK.size : ASK.size + head]))
            sent = bytes(self.inbox[ASK.size + head : end])
            del self.inbox[:end]
            getattr(self, "do_" + asked.pop("ask"))(**asked, **({"data": sent} if sent else {}))
        return bool(data)

    # What can be asked for.

    def do_spawn(
        self, id: int, last: bool, room: int | None, data: bytes = b"", **how: Any
    ) -> None:
        pipes = [os.pipe() for _ in range(3)]
        ours = (pipes[0][1], pipes[1][0], pipes[2][0])
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
        try:
            pid = os.fork()
        except OSError as error:
            for fd in (*ours, *theirs):
                os.close(fd)
            self.send(OUT, id, 2, data=f"cannot start: {error}\n".encode())
            self.send(EXIT, id, 126)
            return
        if pid == 0:
            exec_job(theirs, self.settings, self.userns, how)
        for fd in theirs:
            os.close(fd)
        for fd in ours:
            os.set_blocking(fd, False)
        job = self.jobs[id] = SupervisedJob(id, pid, ours[0], last, data)
        for number in (1, 2):
            most, tail = room or self.settings["room"], self.settings["tail"]
            stream = job.streams[number] = JobOutput(job, number, ours[number], most, tail)
            self.selector.register(stream.fd, selectors.EVENT_READ, stream)
        self.selector.register(ours[0], selectors.EVENT_WRITE, job)
        self.write_stdin(job)

    def do_feed(self, id: int, last: bool, data: bytes = b"") -> None:
        job = self.jobs.get(id)
        if job is None or job.stdin is None:
            return
        job.before = descendants({job.pid})
        idle = not job.pending
        job.pending += data
        job.last |= last
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
        if os.getpid() == 1:  # elsewhere -1 would be everything on the machine
            for _ in range(2):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGSTOP)
        self.send(STOPPED)

    def do_end(self) -> None:
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline and not self.reap():
            if os.getpid() == 1:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
            else:
                kill_tree({os.getpid()}, spared={os.getpid()})
            time.sleep(0.002)
        self.send(STOPPED)

    def do_go(self) -> None:
        if os.getpid() == 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGCONT)

    # What happens by itself.

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
            job.last = True
        self.selector.unregister(job.stdin)
        if job.last:
            os.close(job.stdin)
            job.stdin = None

    def forward_chunk(self, stream: JobOutput) -> bool:
        """One chunk on its way; whether there may be another."""
        if stream.fd < 0:  # it ended by another event of the same moment
            return False
        try:
            data = os.read(stream.fd, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self.close_stream(stream)
            return False
        job = stream.job
        if job.name in self.jobs:  # else it has ended, and what lives on writes to nobody
            passed = stream.split(data)
            if passed:
                self.send(OUT, job.name, stream.number, data=passed)
        else:
            stream.lost += len(data)
        if stream.lost > FLOOD_BYTES and self.selector.get_map().get(stream.fd):
            self.selector.unregister(stream.fd)
            self.resting.append((time.monotonic() + FLOOD_REST_S, stream))
            return False
        return True

    def close_stream(self, stream: JobOutput) -> None:
        if stream.fd >= 0:
            if self.selector.get_map().get(stream.fd):
                self.selector.unregister(stream.fd)
            self.resting = [rest for rest in self.resting if rest[1] is not stream]
            os.close(stream.fd)
            stream.fd = -1

    def drain_job(self, job: SupervisedJob) -> list[int]:
        """Read what a job has written; how much of it was lost and how much is kept as tails."""
        for stream in job.streams.values():
            most = 64  # chunks: more than a pipe holds, and an end to what others go on writing
            while stream.fd >= 0 and most and self.forward_chunk(stream):
                most -= 1
        streams = job.streams.values()
        return [*(each.lost for each in streams), *(len(each.tail) for each in streams)]

    def flush_tails(self, job: SupervisedJob) -> bytes:
        return b"".join(stream.tail for stream in job.streams.values())

    def reap(self) -> bool:
        """Bury the dead, our own jobs and orphans alike; whether nobody is left."""
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
    """A user namespace with all the ids of this one. Without `nesting` no further one can be made
    in it: with rights in one of their own, processes would reach far more of the kernel."""
    with open("/proc/self/uid_map") as file:
        ids = file.read().split()[2]
    inner = make_user_namespace(f"0 0 {ids}")
    if nesting:
        return inner
    with contextlib.suppress(OSError), open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("1")
    return inner


def silence_traceback(*_: object) -> None:
    """A traceback would load files that the sandbox may have written."""
    os._exit(70)


def main(settings: dict[str, Any]) -> None:
    control = os.dup(0)
    nothing = os.open("/dev/null", os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # the first process does not hear them, then
    for fd in settings["cgroups"]:
        os.set_inheritable(fd, False)  # the way into the group is for `become` alone
    prctl(PR_SET_DUMPABLE, 0)
    sys.excepthook = silence_traceback
    if os.getpid() == 1:
        with contextlib.suppress(OSError), open(settings["low_ports"], "w") as file:
            file.write("0")  # no process here has rights over the network namespace
    else:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        ProcessSupervisor(control, settings).serve()
    except (BrokenPipeError, ConnectionResetError):
        pass
    finally:
        if os.getpid() != 1:
            kill_tree({os.getpid()}, spared={os.getpid()})
