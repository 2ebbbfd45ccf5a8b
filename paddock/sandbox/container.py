"""Container backend (docker or podman): for tasks with an image, or without bubblewrap.

The container's init process reads from a pipe of ours: when this process is gone, init exits and
the engine removes the container. Commands run by the engine's `exec`.
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

from paddock.sandbox import container_snapshot, filesystem, rootfs
from paddock.sandbox.container_engine import (
    ALL_DEAD,
    DIE_FIRST,
    ENGINE_CWD,
    INIT_SCRIPT,
    INSTALL,
    KILL_TREE,
    MEMORY_KILLS,
    ContainerEngine,
    OutputCollector,
    find_container_engine,
    run_options,
    system_image,
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
from paddock.sandbox.supervised import ENV, INTERNAL_COMMAND_TIMEOUT_S, shell_argv

NOT_STARTED = (125, 126, 255)  # exit codes of an engine that could not start a command
DISK_POLL_S = 1.0
ARCHIVE = "paddock-archive-"
_count = itertools.count()


class ContainerProcess:
    """A `SandboxProcess` in a container."""

    def __init__(self, box: "ContainerSandbox", client: asyncio.subprocess.Process) -> None:
        self.box, self.client = box, client
        half = box.settings.limits.max_output_bytes // 2
        self.out, self.err = OutputCollector(half, half), OutputCollector(half, half)
        assert client.stdout is not None and client.stderr is not None
        self.readers = [
            asyncio.create_task(self.out.read_from(client.stdout)),
            asyncio.create_task(self.err.read_from(client.stderr)),
        ]
        self.pid = ""  # in the container
        self.cut = False

    async def write(self, data: bytes) -> None:
        assert self.client.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.client.stdin.write(data)
            await self.client.stdin.drain()

    async def read(self, stream: Literal["stdout", "stderr"]) -> bytes:
        output = self.out if stream == "stdout" else self.err
        while not output.head and not output.ended:
            output.changed.clear()
            await output.changed.wait()
        return output.take()

    async def drain(self) -> bytes:
        """Unread stdout. The engine has no end marker, so this waits for 50 ms without output."""
        size = -1
        while size != len(self.out.head) + self.out.lost:
            size = len(self.out.head) + self.out.lost
            await asyncio.sleep(0.05)
        self.cut = bool(self.out.lost)
        return self.out.take()

    async def kill(self, *, children_only: bool = False) -> None:
        scope = "only" if children_only else "all"
        argv = ["sh", "-c", KILL_TREE, "sh", self.pid, scope]
        done = await self.box.capture(argv, max_bytes=MIB)
        if done.code in NOT_STARTED:
            await self.box.kill()

    async def wait(self) -> int:
        code = await self.client.wait()
        await asyncio.gather(*self.readers)
        return 128 - code if code < 0 else code


class ContainerSandbox(filesystem.SandboxFilesystem):
    """A `Sandbox` made by a container engine."""

    def __init__(
        self, settings: SandboxSettings, base: tuple[FilesystemSnapshot, ...] = ()
    ) -> None:
        found = find_container_engine()
        if isinstance(found, str):
            raise SandboxError(f"no container engine: {found} ({INSTALL})")
        if len(base) > 1:
            raise SandboxError(f"a container starts from at most one snapshot, got {len(base)}")
        self.engine: ContainerEngine = found
        self.settings, self.workspace = settings, settings.workdir
        self.python: tuple[str, ...] = (
            ("python3",) if settings.image else (rootfs.python_command()[0],)
        )
        self.shell = "/bin/sh" if settings.image else "/bin/bash"
        self.base = base[0] if base else None
        self.name = f"paddock-{os.getpid()}-{next(_count)}"
        self._client: asyncio.subprocess.Process | None = None
        self._disk_watcher: asyncio.Task[None] | None = None
        self._disk_full = False
        self._closed = False
        self._memory_kills = 0

    async def start(self) -> None:
        if self._client is not None:
            raise SandboxError("the sandbox is already started")
        try:
            async with asyncio.timeout(self.settings.start_timeout_s):
                await self._start()
        except TimeoutError:
            await self.close()
            raise SandboxError(
                f"the container did not start within {self.settings.start_timeout_s:g} s"
            ) from None
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        args = await asyncio.to_thread(self._run_args)
        self._client = await self._call(*args)
        assert self._client.stdout is not None and self._client.stderr is not None
        if b"ready" not in await self._client.stdout.readline():
            errors = (await self._client.stderr.read()).decode(errors="replace").strip()
            message = errors.splitlines()[-1] if errors else "the container exited"
            raise SandboxError(f"{self.engine.name}: {message}")
        if self.settings.image:
            found = await self.capture(["sh", "-c", "command -v bash"], max_bytes=MIB)
            self.shell = "/bin/sh" if found.code else "bash"
        await self.capture(
            ["mkdir", "-p", self.workspace, *self.settings.writable_paths], max_bytes=MIB
        )
        if self.base is not None and _is_archive(self.base):
            await self._unpack(Path(self.base.place))
        if self.settings.writable_root:
            self._disk_watcher = asyncio.create_task(self._watch_disk())

    def _run_args(self) -> list[str]:
        image = self.settings.image or system_image(self.engine)
        if self.base is not None and not _is_archive(self.base):
            image = self.base.place
        options = run_options(self.engine, self.settings)
        init = ("--entrypoint", "sh", image, "-c", INIT_SCRIPT)
        return ["run", "--rm", "-i", "--name", self.name, *options, *init]

    async def _call(self, *args: str, stdin: bool = True) -> asyncio.subprocess.Process:
        """Start a command of the engine."""
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            self.engine.program,
            *args,
            stdin=pipe if stdin else asyncio.subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            cwd=ENGINE_CWD,
        )

    def _exec_args(
        self, cwd: str | None, env: Mapping[str, str] | None, user: str | int | None
    ) -> list[str]:
        variables = {**ENV, **(env or {})}
        if self.settings.image and "PATH" not in (env or {}):
            del variables["PATH"]  # the image has its own
        args = ["exec", "-i", "-w", cwd or self.workspace]
        args += [word for key, value in variables.items() for word in ("-e", f"{key}={value}")]
        args += [] if user is None else ["-u", str(user)]
        return [*args, self.name]

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
        outputs = OutputCollector(half, half), OutputCollector(half, half)
        started = time.monotonic()
        # `timeout` runs inside: killing the engine's client would not end the command.
        argv = ["timeout", "-s", "KILL", f"{limit:.3f}", *shell_argv(command, self.shell)]
        argv = ["sh", "-c", DIE_FIRST, "sh", *argv]
        code = await self._run([*self._exec_args(cwd, env, user), *argv], outputs, stdin, limit)
        seconds = time.monotonic() - started
        timed_out = code == 137 and seconds >= limit
        out, err = (output.text().decode(errors="replace") for output in outputs)
        return ExecResult(
            stdout=out,
            stderr=err,
            code=code,
            seconds=seconds,
            stdout_cut=bool(outputs[0].lost),
            stderr_cut=bool(outputs[1].lost),
            timed_out=timed_out,
            out_of_memory=code != 0 and not timed_out and await self._ran_out_of_memory(),
        )

    async def _run(
        self,
        args: list[str],
        outputs: tuple[OutputCollector, OutputCollector],
        stdin: bytes,
        limit: float,
    ) -> int:
        """Run a command of the engine to its end and return its exit code."""
        if self._closed or self._client is None:
            raise SandboxError(
                "the sandbox is closed" if self._closed else "the sandbox is not started"
            )
        client = await self._call(*args)
        assert client.stdin and client.stdout and client.stderr
        streams = (client.stdout, client.stderr)
        readers = [
            asyncio.create_task(output.read_from(stream))
            for output, stream in zip(outputs, streams, strict=True)
        ]
        try:
            async with asyncio.timeout(limit + 15):
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    client.stdin.write(stdin)
                    await client.stdin.drain()
                    client.stdin.close()
                code = await client.wait()
                await asyncio.gather(*readers)
        except TimeoutError:
            raise SandboxError("the container does not respond") from None
        finally:
            for reader in readers:
                reader.cancel()
            if client.returncode is None:
                client.kill()
                await client.wait()
        if self._client.returncode is not None:
            limit_bytes = self.settings.limits.disk_bytes
            full = f"disk limit exceeded: more than {limit_bytes} bytes were written"
            raise SandboxError(full if self._disk_full else "the container died")
        return 128 - code if code < 0 else code

    async def _ran_out_of_memory(self) -> bool:
        counters = await self.capture(["sh", "-c", MEMORY_KILLS], max_bytes=MIB)
        rows = [row.split() for row in counters.stdout.decode(errors="replace").splitlines()]
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
        argv = ["sh", "-c", f"echo $$ >&2; {DIE_FIRST}", "sh", *shell_argv(command, self.shell)]
        client = await self._call(*self._exec_args(cwd, env, user), *argv)
        assert client.stderr is not None
        line = await client.stderr.readline()
        process = ContainerProcess(self, client)
        process.pid = line.decode().strip()
        if not process.pid.isdigit():
            raise SandboxError(f"the container could not start a process: {process.pid}")
        return process

    async def capture(
        self, argv: Sequence[str], *, stdin: bytes = b"", max_bytes: int
    ) -> CapturedOutput:
        out, err = OutputCollector(max_bytes, 0), OutputCollector(MIB, 0)
        args = ["exec", "-i", "-u", "0", "-w", "/", self.name, *argv]
        code = await self._run(args, (out, err), stdin, INTERNAL_COMMAND_TIMEOUT_S)
        return CapturedOutput(out.text(), err.text(), code, cut=bool(out.lost))

    async def kill(self) -> None:
        await asyncio.to_thread(self.engine.run, "kill", "-s", "USR1", self.name)
        for _ in range(50):
            if (await self.capture(["sh", "-c", ALL_DEAD], max_bytes=MIB)).code not in NOT_STARTED:
                return
        raise SandboxError("processes in the container survived SIGKILL")

    async def snapshot(self, keep: SnapshotFilter = KEEP_ALL) -> FilesystemSnapshot:
        if self.settings.writable_root and keep != KEEP_ALL:
            with tempfile.NamedTemporaryFile(prefix=ARCHIVE, delete=False) as file:
                mounted = (*rootfs.python_command()[1], *self.settings.read_only_mounts)
                args = (self.engine, self.name, keep, mounted, Path(file.name))
                await asyncio.to_thread(container_snapshot.save_snapshot, *args)
            return FilesystemSnapshot(backend="container", place=file.name)
        if self.settings.writable_root:
            name = f"paddock-snapshot-{self.name}:{next(_count)}"
            await asyncio.to_thread(self.engine.run, "commit", "-q", self.name, name)
            return FilesystemSnapshot(backend="container", place=name)
        folders = [path.strip("/") for path in (self.workspace, *self.settings.writable_paths)]
        max_bytes = self.settings.limits.disk_bytes * (1 + len(folders))
        done = await self.capture(["tar", "-cf", "-", "-C", "/", *folders], max_bytes=max_bytes)
        if done.code or done.cut:
            raise SandboxError("the snapshot of the container failed")
        with tempfile.NamedTemporaryFile(prefix=ARCHIVE, delete=False) as file:
            file.write(done.stdout)
        return FilesystemSnapshot(backend="container", place=file.name)

    async def _unpack(self, archive: Path) -> None:
        if self.settings.writable_root:
            replaced, additions = await asyncio.to_thread(
                container_snapshot.archive_folders, archive
            )
            await self.capture(["rm", "-rf", "--", *replaced], max_bytes=MIB)
            listing = (
                await self.capture(["find", *additions], max_bytes=64 * MIB) if additions else None
            )
            existing = (
                set(listing.stdout.decode(errors="replace").splitlines()) if listing else set()
            )
            await asyncio.to_thread(
                container_snapshot.restore_snapshot, self.engine, self.name, archive, existing
            )
            return
        argv = ["tar", "-xpf", "-", "-C", "/"]
        done = await self.capture(argv, stdin=archive.read_bytes(), max_bytes=MIB)
        if done.code:
            raise SandboxError(
                f"the snapshot could not be restored: {done.stderr.decode().strip()}"
            )

    async def _watch_disk(self) -> None:
        """Remove the container at its disk limit: common storage drivers have no quota."""
        args = ("container", "inspect", "-s", "-f", "{{.SizeRw}}", self.name)
        while True:
            await asyncio.sleep(DISK_POLL_S)
            with contextlib.suppress(SandboxError, ValueError):
                size = int(await asyncio.to_thread(self.engine.run, *args))
                if size > self.settings.limits.disk_bytes:
                    self._disk_full = True
                    await self._remove()
                    return

    async def _remove(self) -> None:
        no_grace = ("-t", "0") if self.engine.name == "podman" else ()
        remove = await self._call("rm", "-f", *no_grace, self.name, stdin=False)
        await remove.communicate()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._disk_watcher is not None:
            self._disk_watcher.cancel()
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
    """Why containers do not work on this machine; None if they do."""
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
