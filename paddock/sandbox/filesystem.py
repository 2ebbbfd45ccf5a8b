"""Files into a sandbox and out of it.

Always through a process inside: whatever links the sandbox has laid, they lead to its own files.
What comes out is an archive that somebody may have forged, and is treated so.
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
    """What a program of our own wrote inside."""

    stdout: bytes
    stderr: bytes
    code: int
    cut: bool


class SandboxFilesystem(ABC):
    """What every sandbox does with files; a path that does not begin at the root begins in the
    workspace."""

    workspace: str

    @abstractmethod
    async def capture(
        self, argv: Sequence[str], *, stdin: bytes = b"", most: int
    ) -> CapturedOutput:
        """Run to the end as the sandbox's root; at most so many bytes of stdout."""

    async def put(self, source: Path | bytes, target: str) -> None:
        await put(self, source, self._absolute(target))

    async def get(self, source: str, target: Path, *, most_bytes: int = 64 * MIB) -> None:
        await get(self, self._absolute(source), target, most_bytes)

    async def read(self, path: str, *, most_bytes: int = 16 * MIB) -> bytes:
        return await read(self, self._absolute(path), most_bytes)

    def _absolute(self, path: str) -> str:
        return path if path.startswith("/") else f"{self.workspace}/{path}"


async def put(box: SandboxFilesystem, source: Path | bytes, target: str) -> None:
    where, name = PurePosixPath(target), ""
    if isinstance(source, bytes) or source.is_file():
        where, name = where.parent, where.name
    elif not source.is_dir():
        raise FileNotFoundError(2, "no such file or folder", str(source))
    done = await box.capture(
        ["sh", "-c", UNPACK, "sh", str(where)], stdin=pack(source, name), most=MIB
    )
    if done.code:
        said = done.stderr.decode(errors="replace").strip()
        raise SandboxError(f"could not put {target} into the sandbox: {said}")


def pack(source: Path | bytes, name: str) -> bytes:
    """A file under that name, or what a folder holds, as an archive; all of it belongs to root."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w", format=tarfile.GNU_FORMAT) as archive:
        if isinstance(source, bytes):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(source), 0o644
            archive.addfile(entry, io.BytesIO(source))
        elif source.is_file():
            archive.add(source.resolve(), name, filter=_roots)
        else:
            for child in sorted(source.iterdir()):
                archive.add(child, child.name, filter=_roots)
    return whole.getvalue()


def _roots(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


async def get(box: SandboxFilesystem, source: str, target: Path, most: int) -> None:
    where = PurePosixPath(source)
    if target.exists():
        raise FileExistsError(17, "already there", str(target))
    done = await box.capture(
        ["tar", "-cf", "-", "-C", str(where.parent), "--", where.name or "."],
        most=most + MIB,
    )
    if done.cut:
        raise SandboxError(f"{source} in the sandbox has more than {most} bytes")
    if done.code and not done.stdout.strip(b"\0"):
        said = done.stderr.decode(errors="replace").strip()
        raise FileNotFoundError(2, f"not to be had from the sandbox ({said})", source)
    unpack(done.stdout, where.name, target, most)


def unpack(data: bytes, name: str, target: Path, most: int) -> None:
    """Lay what an archive holds under `name` at `target`; nothing anywhere else. Links that lead
    out, devices and the like are left behind."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            kept = [each for each in map(_renamed(name), archive.getmembers()) if each is not None]
            if sum(entry.size for entry in kept) > most:
                raise SandboxError(f"{name} in the sandbox has more than {most} bytes")
            single = len(kept) == 1 and kept[0].name == "." and kept[0].isfile()
            if single:
                stream = archive.extractfile(kept[0])
                target.write_bytes(stream.read() if stream else b"")
                target.chmod(0o644 | kept[0].mode & 0o111)
                return
            target.mkdir(parents=True)
            archive.extractall(target, members=kept, filter=_harmless)
    except (tarfile.TarError, ValueError, OSError) as error:
        if isinstance(error, SandboxError):
            raise
        raise SandboxError(f"{name}: no sound archive came out of the sandbox: {error}") from error


def _renamed(name: str) -> Callable[[tarfile.TarInfo], tarfile.TarInfo | None]:
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


def _harmless(entry: tarfile.TarInfo, target: str) -> tarfile.TarInfo | None:
    try:
        return tarfile.data_filter(entry, target)
    except tarfile.FilterError:
        return None


async def read(box: SandboxFilesystem, path: str, most: int) -> bytes:
    # Only a plain file ends: a pipe or a device that was put there would be read for ever.
    script = 'test -f "$1" && exec cat -- "$1"'
    done = await box.capture(["sh", "-c", script, "sh", path], most=most)
    if done.cut:
        raise SandboxError(f"{path} in the sandbox has more than {most} bytes")
    if done.code:
        raise FileNotFoundError(2, "not in the sandbox", path)
    return done.stdout
