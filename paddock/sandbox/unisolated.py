"""Backend without isolation: commands run as you on this machine, with per-process limits.

For machines where no other backend works and for trusted code. It must be allowed explicitly, and
it warns.
"""

import asyncio
import os
import shutil
import socket
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any

from paddock.sandbox import rootfs
from paddock.sandbox.channel import GRACE_S, SupervisorChannel
from paddock.sandbox.sandbox import FilesystemSnapshot, SandboxError, SandboxSettings
from paddock.sandbox.snapshot_filter import KEEP_ALL, SnapshotFilter
from paddock.sandbox.supervised import ENV, SupervisedSandbox, guest_command, rlimits


class UnisolatedSandbox(SupervisedSandbox):
    """A `Sandbox` in name only: a temporary directory as workspace and no isolation."""

    shell = "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"

    def __init__(
        self, settings: SandboxSettings, base: tuple[FilesystemSnapshot, ...] = ()
    ) -> None:
        if not settings.allow_unisolated:
            raise SandboxError(
                "the backend 'unisolated' runs untrusted code as you, with all your files: "
                "set allow_unisolated = true to accept this"
            )
        warnings.warn("code runs without a sandbox, as you, with all your files", stacklevel=2)
        self.settings = settings
        self.python = (rootfs.python_command()[0],)
        self.base = base
        self.workspace = tempfile.mkdtemp(prefix="paddock-unisolated-")
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        for snapshot in reversed(self.base):
            shutil.copytree(snapshot.place, self.workspace, dirs_exist_ok=True, symlinks=True)
        half = self.settings.limits.max_output_bytes // 2
        settings: dict[str, Any] = {
            "namespace": False,
            "cgroups": [],
            "filter": b"",
            "rlimits": rlimits(self.settings.limits, grouped=False),
            "head_bytes": half,
            "tail_bytes": half,
        }
        del settings["rlimits"]["NPROC"]  # it would count all processes of the user
        argv, fd = guest_command("supervisor", settings)
        ours, theirs = socket.socketpair()
        with theirs, open(fd, "rb"):
            self._process = subprocess.Popen(argv, stdin=theirs.fileno(), pass_fds=[fd], env=ENV)
        self.channel = SupervisorChannel(ours)
        self.channel.receive()
        try:
            async with asyncio.timeout(self.settings.start_timeout_s):
                await self.channel.ready.wait()
        except TimeoutError:
            await self.close()
            raise SandboxError(
                f"the supervisor did not start within {self.settings.start_timeout_s:g} s"
            ) from None

    def _absolute(self, path: str) -> str:
        absolute = Path(os.path.normpath(Path(self.workspace, path)))
        if not absolute.is_relative_to(self.workspace):
            raise SandboxError(
                f"without a sandbox {path} is this machine's own; use a path in the workspace"
            )
        return str(absolute)

    async def snapshot(self, keep: SnapshotFilter = KEEP_ALL) -> FilesystemSnapshot:
        if keep != KEEP_ALL:
            raise SandboxError("the backend 'unisolated' cannot filter a snapshot")
        copy = tempfile.mkdtemp(prefix="paddock-snapshot-")
        shutil.copytree(self.workspace, copy, dirs_exist_ok=True, symlinks=True)
        return FilesystemSnapshot(backend="unisolated", place=copy)

    async def close(self) -> None:
        if self.channel is not None and not self.channel.closed:
            await self.channel.close()
            assert self._process is not None
            try:
                await asyncio.to_thread(self._process.wait, GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        shutil.rmtree(self.workspace, ignore_errors=True)


def delete_snapshot(snapshot: FilesystemSnapshot) -> None:
    shutil.rmtree(snapshot.place, ignore_errors=True)
