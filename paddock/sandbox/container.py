"""Sandboxes by a container engine, for tasks that bring an image or where bubblewrap cannot work.

The container's first process reads from a pipe of ours: when we are gone, it ends, and the engine
removes the container. Commands run by the engine's `exec`.
"""

import asyncio
import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from paddock.sandbox import container_snapshot, filesystem, rootfs, seccomp
from paddock.sandbox.container_engine import (
    INSTALL,
    NOWHERE,
    ContainerEngine,
    OutputCollector,
    find_container_engine,
    system_image,
    system_mounts,
)
from paddock.sandbox.filesystem import CapturedOutput
from paddock.sandbox.sandbox import (
    MIB,
    Command,
    ExecResult,
    FilesystemSnapshot,
    SandboxError,
    SandboxProcess,
    SandboxSettings,
)
from paddock.sandbox.snapshot_filter import KEEP_ALL, SnapshotFilter
from paddock.sandbox.supervised import ENV, INTERNAL_COMMAND_TIMEOUT_S, rlimits, shell_argv

# It buries orphans while it waits, begins anew if somebody kills its child, and ends with the pipe.
# At USR1 it kills all others: where a limit leaves no room for another process, only it can.
INIT_SCRIPT = """trap "" TERM INT HUP QUIT; trap "kill -KILL -1" USR1; exec 3<&0; echo ready
while :; do cat <&3 >/dev/null & wait $!; test $? -lt 128 && break; done"""
# Kills a process with everything below it, or only what is below it, stopping each first.
KILL_TREE = """
below() { for child in $(cat /proc/"$1"/task/*/children 2>/dev/null); do
kill -STOP "$child" 2>/dev/null; below "$child"; kill -KILL "$child" 2>/dev/null; done; }
test "$2" = only || kill -STOP "$1"; below "$1"; test "$2" = only || kill -KILL "$1"
"""
# Waits without any other program until the dead are buried, but for the first process, its child
# and this one.
ALL_DEAD = """i=0
while test $i -lt 20000; do set -- /proc/[0-9]*; test $# -lt 5 && exit; i=$((i + 1)); done"""
# Where memory that ran out is counted, in either version of control groups.
MEMORY_KILLS = "cat /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control"
# Where memory runs out, commands die before the first process, which keeps the container alive.
DIE_FIRST = 'echo 1000 >/proc/self/oom_score_adj; exec "$@"'
OWN_FOLDERS = ("/tmp", "/run", "/root", "/home", "/var/tmp", "/var/log", "/opt", "/srv")
DROPPED_CAPABILITIES = ("AUDIT_WRITE", "MKNOD", "NET_RAW")  # capabilities that an engine may give
NOT_STARTED = (125, 126, 255)  # engines' words for a command that could not be started
DISK_POLL_S = 1.0
ARCHIVE = "paddock-archive-"
_count = itertools.count()


class ContainerProcess:
    """A program in a container that one talks to; a `Process`."""

    def __init__(self, box: "ContainerSandbox", client: asyncio.subprocess.Process) -> None:
        self.box, self.client = box, client
        half = box.settings.limits.max_output_bytes // 2
        self.out, self.err = OutputCollector(half, half), OutputCollector(half, half)
        assert client.stdout is not None and client.stderr is not None
        self.followers = [
            asyncio.create_task(self.out.read_from(client.stdout)),
            asyncio.create_task(self.err.read_from(client.stderr)),
        ]
        self.pid = ""  # inside
        self.cut = False

    async def write(self, data: bytes) -> None:
        assert self.client.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.client.stdin.write(data)
            await self.client.stdin.drain()

    async def read(self, stream: Literal["stdout", "stderr"]) -> bytes:
        flow = self.out if stream == "stdout" else self.err
        while not flow.head and not flow.ended:
            flow.news.clear()
            await flow.news.wait()
        return flow.take()

    async def drain(self) -> bytes:
        """The engine does not say when all has come through: what comes in a moment of silence."""
        size = -1
        while size != len(self.out.head) + self.out.lost:
            size = len(self.out.head) + self.out.lost
            await asyncio.sleep(0.05)
        self.cut = bool(self.out.lost)
        return self.out.take()

    async def kill(self, *, children_only: bool = False) -> None:
        only = "only" if children_only else "all"
        done = await self.box.capture(["sh", "-c", KILL_TREE, "sh", self.pid, only], most=MIB)
        if done.code in NOT_STARTED:
            await self.box.kill()

    async def wait(self) -> int:
        code = await self.client.wait()
        await asyncio.gather(*self.followers)
        return 128 - code if code < 0 else code


class ContainerSandbox(filesystem.SandboxFilesystem):
    def __init__(
        self, settings: SandboxSettings, base: tuple[FilesystemSnapshot, ...] = ()
    ) -> None:
        found = find_container_engine()
        if isinstance(found, str):
            raise SandboxError(f"no container engine: {found} ({INSTALL})")
        if len(base) > 1:
            raise SandboxError("a container starts from one snapshot, not from several")
        self.engine: ContainerEngine = found
        self.settings, self.workspace = settings, settings.workdir
        self.python: tuple[str, ...] = (
            ("python3",) if settings.image else (rootfs.python_command()[0],)
        )
        self.shell = "/bin/sh" if settings.image else "/bin/bash"
        self.base = base[0] if base else None
        self.name = f"paddock-{os.getpid()}-{next(_count)}"
        self._client: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._full = False
        self._closed = False
        self._memory_kills = 0

    async def start(self) -> None:
        if self._client is not None:
            raise SandboxError("the sandbox was started before")
        try:
            async with asyncio.timeout(self.settings.start_timeout_s):
                await self._start()
        except TimeoutError:
            await self.close()
            raise SandboxError(f"no container after {self.settings.start_timeout_s:g} s") from None
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        words = await asyncio.to_thread(self._run_words)
        self._client = await self._call(*words)
        assert self._client.stdout is not None and self._client.stderr is not None
        if b"ready" not in await self._client.stdout.readline():
            said = (await self._client.stderr.read()).decode(errors="replace").strip()
            raise SandboxError(f"{self.engine.name}: {said.splitlines()[-1] if said else 'died'}")
        if self.settings.image:
            found = await self.capture(["sh", "-c", "command -v bash"], most=MIB)
            self.shell = "/bin/sh" if found.code else "bash"
        await self.capture(["mkdir", "-p", self.workspace, *self.settings.writable_paths], most=MIB)
        if self.base is not None and _is_archive(self.base):
            await self._unpack(Path(self.base.place))
        if self.settings.writable_root:
            self._watch = asyncio.create_task(self._watch_disk())

    def _run_words(self) -> list[str]:
        settings, limits = self.settings, self.settings.limits
        own = not settings.image
        image = settings.image or system_image(self.engine)
        memory = limits.memory_bytes + (0 if settings.writable_root else limits.disk_bytes)
        rows = rlimits(limits, grouped=True).items()
        ulimits = [f"--ulimit={name.lower()}={value}:{value}" for name, value in rows]
        disk = f"rw,exec,nosuid,nodev,size={limits.disk_bytes}"
        words = [
            *("run", "--rm", "-i", "--name", self.name, *self.engine.flags, *ulimits),
            *("--memory", str(memory), "--memory-swap", str(memory), "--cpus", str(limits.cpus)),
            *("--pids-limit", str(limits.max_processes), "--security-opt", "no-new-privileges"),
            *(
                "--security-opt",
                f"seccomp={seccomp.profile_file(settings.allow_syscalls, rootfs.cache_dir())}",
            ),
            *(f"--cap-drop={name}" for name in DROPPED_CAPABILITIES),
            *("--hostname", "sandbox", "--shm-size", str(limits.disk_bytes)),
            *(() if settings.allow_internet else ("--network", "none")),
            *(system_mounts() if own else ()),
            *(word for path in settings.read_only_mounts for word in ("-v", f"{path}:{path}:ro")),
        ]
        if not settings.writable_root:
            places = dict.fromkeys((*OWN_FOLDERS, self.workspace, *settings.writable_paths))
            words += ["--read-only"]
            words += ["--read-only-tmpfs=false"] if self.engine.name == "podman" else []
            words += [word for path in places for word in ("--tmpfs", f"{path}:{disk}")]
        place = image if self.base is None or _is_archive(self.base) else self.base.place
        return [*words, "--entrypoint", "sh", place, "-c", INIT_SCRIPT]

    async def _call(self, *words: str, stdin: bool = True) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            self.engine.program,
            *words,
            stdin=pipe if stdin else asyncio.subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            cwd=NOWHERE,
        )

    def _exec_words(
        self, cwd: str | None, env: Mapping[str, str] | None, user: str | int | None
    ) -> list[str]:
        known = {**ENV, **(env or {})}
        if self.settings.image and "PATH" not in (env or {}):
            del known["PATH"]  # the image's own
        words = ["exec", "-i", "-w", cwd or self.workspace]
        words += [word for key, value in known.items() for word in ("-e", f"{key}={value}")]
        words += [] if user is None else ["-u", str(user)]
        return [*words, self.name]

    async def exec(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        user: str | int | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        limit = timeout_s or self.settings.timeout_s
        half = self.settings.limits.max_output_bytes // 2
        flows = OutputCollector(half, half), OutputCollector(half, half)
        began = time.monotonic()
        # Only a process inside can kill what runs inside: the engine's client would only go away.
        inside = ["timeout", "-s", "KILL", f"{limit:.3f}", *shell_argv(command, self.shell)]
        inside = ["sh", "-c", DIE_FIRST, "sh", *inside]
        code = await self._run([*self._exec_words(cwd, env, user), *inside], flows, stdin, limit)
        seconds = time.monotonic() - began
        timed_out = code == 137 and seconds >= limit
        out, err = (flow.text().decode(errors="replace") for flow in flows)
        return ExecResult(
            stdout=out,
            stderr=err,
            code=code,
            seconds=seconds,
            stdout_cut=bool(flows[0].lost),
            stderr_cut=bool(flows[1].lost),
            timed_out=timed_out,
            out_of_memory=code != 0 and not timed_out and await self._ran_out_of_memory(),
        )

    async def _run(
        self,
        words: list[str],
        flows: tuple[OutputCollector, OutputCollector],
        stdin: bytes,
        limit: float,
    ) -> int:
        """Run a client of the engine to its end; its code."""
        if self._closed or self._client is None:
            raise SandboxError("the sandbox is closed" if self._closed else "not started")
        client = await self._call(*words)
        assert client.stdin and client.stdout and client.stderr
        streams = (client.stdout, client.stderr)
        followers = [
            asyncio.create_task(flow.read_from(stream))
            for flow, stream in zip(flows, streams, strict=True)
        ]
        try:
            async with asyncio.timeout(limit + 15):
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    client.stdin.write(stdin)
                    await client.stdin.drain()
                    client.stdin.close()
                code = await client.wait()
                await asyncio.gather(*followers)
        except TimeoutError:
            raise SandboxError("the container does not answer") from None
        finally:
            for follower in followers:
                follower.cancel()
            if client.returncode is None:
                client.kill()
                await client.wait()
        if self._client.returncode is not None:
            full = f"more than {self.settings.limits.disk_bytes} bytes were written"
            raise SandboxError(full if self._full else "the container died")
        return 128 - code if code < 0 else code

    async def _ran_out_of_memory(self) -> bool:
        found = await self.capture(["sh", "-c", MEMORY_KILLS], most=MIB)
        rows = [row.split() for row in found.stdout.decode(errors="replace").splitlines()]
        kills = sum(int(row[1]) for row in rows if len(row) == 2 and row[0] == "oom_kill")
        before, self._memory_kills = self._memory_kills, kills
        return kills > before

    async def spawn(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
    ) -> SandboxProcess:
        words = ["sh", "-c", f"echo $$ >&2; {DIE_FIRST}", "sh", *shell_argv(command, self.shell)]
        client = await self._call(*self._exec_words(cwd, env, user), *words)
        assert client.stderr is not None
        line = await client.stderr.readline()
        process = ContainerProcess(self, client)
        process.pid = line.decode().strip()
        if not process.pid.isdigit():
            raise SandboxError(f"the container starts nothing: {process.pid}")
        return process

    async def capture(
        self, argv: Sequence[str], *, stdin: bytes = b"", most: int
    ) -> CapturedOutput:
        flows = OutputCollector(most, 0), OutputCollector(MIB, 0)
        words = ["exec", "-i", "-u", "0", "-w", "/", self.name, *argv]
        code = await self._run(words, flows, stdin, INTERNAL_COMMAND_TIMEOUT_S)
        return CapturedOutput(flows[0].text(), flows[1].text(), code, cut=bool(flows[0].lost))

    async def kill(self) -> None:
        await asyncio.to_thread(self.engine.run, "kill", "-s", "USR1", self.name)
        for _ in range(50):
            if (await self.capture(["sh", "-c", ALL_DEAD], most=MIB)).code not in NOT_STARTED:
                return
        raise SandboxError("what runs in the container cannot be killed")

    async def snapshot(self, keep: SnapshotFilter = KEEP_ALL) -> FilesystemSnapshot:
        if self.settings.writable_root and keep != KEEP_ALL:
            with tempfile.NamedTemporaryFile(prefix=ARCHIVE, delete=False) as file:
                mounted = (*rootfs.python_command()[1], *self.settings.read_only_mounts)
                told = (self.engine, self.name, keep, mounted, Path(file.name))
                await asyncio.to_thread(container_snapshot.save_snapshot, *told)
            return FilesystemSnapshot(backend="container", place=file.name)
        if self.settings.writable_root:
            name = f"paddock-snapshot-{self.name}:{next(_count)}"
            await asyncio.to_thread(self.engine.run, "commit", "-q", self.name, name)
            return FilesystemSnapshot(backend="container", place=name)
        folders = [path.strip("/") for path in (self.workspace, *self.settings.writable_paths)]
        most = self.settings.limits.disk_bytes * (1 + len(folders))
        done = await self.capture(["tar", "-cf", "-", "-C", "/", *folders], most=most)
        if done.code or done.cut:
            raise SandboxError("no snapshot could be taken of the container")
        with tempfile.NamedTemporaryFile(prefix=ARCHIVE, delete=False) as file:
            file.write(done.stdout)
        return FilesystemSnapshot(backend="container", place=file.name)

    async def _unpack(self, archive: Path) -> None:
        if self.settings.writable_root:
            replaced, additions = await asyncio.to_thread(
                container_snapshot.archive_folders, archive
            )
            await self.capture(["rm", "-rf", "--", *replaced], most=MIB)
            found = await self.capture(["find", *additions], most=64 * MIB) if additions else None
            there = set(found.stdout.decode(errors="replace").splitlines()) if found else set()
            await asyncio.to_thread(
                container_snapshot.restore_snapshot, self.engine, self.name, archive, there
            )
            return
        words = ["tar", "-xpf", "-", "-C", "/"]
        done = await self.capture(words, stdin=archive.read_bytes(), most=MIB)
        if done.code:
            raise SandboxError(f"no snapshot to start from: {done.stderr.decode().strip()}")

    async def _watch_disk(self) -> None:
        """Engines on common file systems have no quota: whoever writes too much is ended."""
        words = ("container", "inspect", "-s", "-f", "{{.SizeRw}}", self.name)
        while True:
            await asyncio.sleep(DISK_POLL_S)
            with contextlib.suppress(SandboxError, ValueError):
                size = int(await asyncio.to_thread(self.engine.run, *words))
                if size > self.settings.limits.disk_bytes:
                    self._full = True
                    await self._remove()
                    return

    async def _remove(self) -> None:
        podman = ("-t", "0") if self.engine.name == "podman" else ()
        remove = await self._call("rm", "-f", *podman, self.name, stdin=False)
        await remove.communicate()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        client = self._client
        if client is not None:
            await self._remove()
            assert client.stdin is not None
            client.stdin.close()
            if client.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    client.kill()
            await client.wait()


def _is_archive(snapshot: FilesystemSnapshot) -> bool:
    return Path(snapshot.place).name.startswith(ARCHIVE)


def unavailable_reason() -> str | None:
    found = find_container_engine()
    return f"no container engine: {found} ({INSTALL})" if isinstance(found, str) else None


def delete_snapshot(snapshot: FilesystemSnapshot) -> None:
    if _is_archive(snapshot):
        Path(snapshot.place).unlink(missing_ok=True)
        return
    found = find_container_engine()
    if isinstance(found, ContainerEngine):
        with contextlib.suppress(SandboxError):
            found.run("rmi", "-f", snapshot.place)
