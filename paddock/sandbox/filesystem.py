"""Copy files into and out of a sandbox.

Always by a process inside, so that symbolic links resolve to the sandbox's own files. The archive
that comes out is untrusted.
"""

import io
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from paddock.sandbox.sandbox import MIB, SandboxError

UNPACK = 'mkdir -p "$1" && exec tar --no-same-owner -xpf - -C "$1"'


@dataclass(frozen=True, slots=True)
class CapturedOutput:
    """Output of an internal command that ran in the sandbox."""

    stdout: bytes
    stderr: bytes
    code: int
    cut: bool


class SandboxFilesystem(ABC):
    """File operations shared by all backends. Relative paths are relative to the workspace."""

    workspace: str

    @abstractmethod
    async def capture(
        self, argv: Sequence[str], *, stdin: bytes = b"", max_bytes: int
    ) -> CapturedOutput:
        """Run to the end as the sandbox's root; stdout is cut after `max_bytes`."""

    async def put(self, source: Path | bytes, target: str) -> None:
        await put(self, source, self._absolute(target))

    async def get(self, source: str, target: Path, *, max_bytes: int = 64 * MIB) -> None:
        await get(self, self._absolute(source), target, max_bytes)

    async def read(self, path: str, *, max_bytes: int = 16 * MIB) -> bytes:
        return await read(self, self._absolute(path), max_bytes)

    def _absolute(self, path: str) -> str:
        return path if path.startswith("/") else f"{self.workspace}/{path}"


async def put(box: SandboxFilesystem, source: Path | bytes, target: str) -> None:
    folder, name = PurePosixPath(target), ""
    if isinstance(source, bytes) or source.is_file():
        folder, name = folder.parent, folder.name
    elif not source.is_dir():
        raise FileNotFoundError(2, "no such file or folder", str(source))
    done = await box.capture(
        ["sh", "-c", UNPACK, "sh", str(folder)], stdin=pack(source, name), max_bytes=MIB
    )
    if done.code:
        errors = done.stderr.decode(errors="replace").strip()
        raise SandboxError(f"{target} could not be written in the sandbox: {errors}")


def pack(source: Path | bytes, name: str) -> bytes:
    """A tar archive of a file under that name, or of a directory's contents, all owned by root."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        if isinstance(source, bytes):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(source), 0o644
            archive.addfile(entry, io.BytesIO(source))
        elif source.is_file():
            archive.add(source.resolve(), name, filter=_owned_by_root)
        else:
            for child in sorted(source.iterdir()):
                archive.add(child, child.name, filter=_owned_by_root)
    return buffer.getvalue()


def _owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


async def get(box: SandboxFilesystem, source: str, target: Path, max_bytes: int) -> None:
    path = PurePosixPath(source)
    if target.exists():
        raise FileExistsError(17, "already exists", str(target))
    done = await box.capture(
        ["tar", "-cf", "-", "-C", str(path.parent), "--", path.name or "."],
        max_bytes=max_bytes + MIB,
    )
    if done.cut:
        raise SandboxError(f"{source} in the sandbox has more than {max_bytes} bytes")
    if done.code and not done.stdout.strip(b"\0"):
        errors = done.stderr.decode(errors="replace").strip()
        raise FileNotFoundError(2, f"cannot be read in the sandbox ({errors})", source)
    unpack(done.stdout, path.name, target, max_bytes)


def unpack(data: bytes, name: str, target: Path, max_bytes: int) -> None:
    """Extract what an archive holds under `name` to `target`, and nothing anywhere else.

    Links that lead out of `target`, devices and other special files are skipped. Raises
    SandboxError if the archive is damaged or larger than `max_bytes`.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            entries = [
                each for each in map(_renamer(name), archive.getmembers()) if each is not None
            ]
            if sum(entry.size for entry in entries) > max_bytes:
                raise SandboxError(f"{name} in the sandbox has more than {max_bytes} bytes")
            single = len(entries) == 1 and entries[0].name == "." and entries[0].isfile()
            if single:
                stream = archive.extractfile(entries[0])
                target.write_bytes(stream.read() if stream else b"")
                target.chmod(0o644 | entries[0].mode & 0o111)
                return
            target.mkdir(parents=True)
            archive.extractall(target, members=entries, filter=_data_filter)
    except (tarfile.TarError, ValueError, OSError) as error:
        if isinstance(error, SandboxError):
            raise
        raise SandboxError(f"{name}: the archive from the sandbox is damaged: {error}") from error


def _renamer(name: str) -> Callable[[tarfile.TarInfo], tarfile.TarInfo | None]:
    def rename(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        parts = PurePosixPath(entry.name).parts
        if not parts or (name and parts[0] != name):
            return None
        inner = parts[1:] if name else parts
        renamed = entry.replace(name=str(PurePosixPath(*inner)) if inner else ".", deep=False)
        if entry.islnk():
            linked = PurePosixPath(entry.linkname).parts
            renamed.linkname = str(PurePosixPath(*(linked[1:] if name else linked)))
        return renamed

    return rename


def _data_filter(entry: tarfile.TarInfo, target: str) -> tarfile.TarInfo | None:
    try:
        return tarfile.data_filter(entry, target)
    except tarfile.FilterError:
        return None


async def read(box: SandboxFilesystem, path: str, max_bytes: int) -> bytes:
    # Regular files only: reading a pipe or a device might never end.
    script = 'test -f "$1" && exec cat -- "$1"'
    done = await box.capture(["sh", "-c", script, "sh", path], max_bytes=max_bytes)
    if done.cut:
        raise SandboxError(f"{path} in the sandbox has more than {max_bytes} bytes")
    if done.code:
        raise FileNotFoundError(2, "no such file in the sandbox", path)
    return done.stdout
