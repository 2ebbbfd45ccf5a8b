"""No sandbox at all: commands run as you, on this machine, with limits of single processes.

For machines where nothing better can be had and for code that is trusted. It must be asked for by
name, and it warns.
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
    shell = "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"

    def __init__(
        self, settings: SandboxSettings, base: tuple[FilesystemSnapshot, ...] = ()
    ) -> None:
        if not settings.allow_unisolated:
            raise SandboxError(
                "the backend 'unisolated' runs untrusted code as you, with all your files: it "
                "needs i_know_it_is_not_isolated = true"
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
            "room": half,
            "tail": half,
        }
        del settings["rlimits"]["NPROC"]  # it would count all of the user's processes
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
            raise SandboxError(f"no runner after {self.settings.start_timeout_s:g} s") from None

    def _absolute(self, path: str) -> str:
        whole = Path(os.path.normpath(Path(self.workspace, path)))
        if not whole.is_relative_to(self.workspace):
            raise SandboxError(f"without a sandbox {path} is this machine's own; use the workspace")
        return str(whole)

    async def snapshot(self, keep: SnapshotFilter = KEEP_ALL) -> FilesystemSnapshot:
        if keep != KEEP_ALL:
            raise SandboxError("without a sandbox a snapshot holds the whole workspace")
        place = tempfile.mkdtemp(prefix="paddock-snapshot-")
        shutil.copytree(self.workspace, place, dirs_exist_ok=True, symlinks=True)
        return FilesystemSnapshot(backend="unisolated", place=place)

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
