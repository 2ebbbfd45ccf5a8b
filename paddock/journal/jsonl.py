"""Append-only JSON-lines files that can be read while they are written.

Each line is one `write` call, so a killed writer leaves a whole line or none, except within a very
long line or after a power cut. Then the last line is torn: readers stop before it, and the next
writer removes it.
"""

import errno
import json
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from shutil import copyfile
from typing import Any


class JsonlWriter:
    """The only writer of a file; `torn_bytes` is the length of the torn line it removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn_bytes = _repair(path)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def append(self, record: dict[str, Any]) -> None:
        """Write one line. It survives the process at once, and a power cut after `sync`."""
        line = json.dumps(_finite(record), allow_nan=False).encode() + b"\n"
        with self._file_errors():
            written = os.write(self._descriptor, line)
        if written < len(line):
            self.close()  # or the next line would continue this one
            raise OSError(
                errno.ENOSPC, "the disk is full: a line was written in part", str(self.path)
            )

    def sync(self) -> None:
        with self._file_errors():
            os.fsync(self._descriptor)

    @contextmanager
    def _file_errors(self) -> Iterator[None]:
        """Add the file name to OS errors, which only know the descriptor."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def close(self) -> None:
        if self._descriptor >= 0:
            self.sync()
            os.close(self._descriptor)
            self._descriptor = -1  # the OS reuses the number for another file


def follow(path: str | Path, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the complete records from byte `offset` on, each with the offset of the next one.

    Ends at the end of the file, before a line that is still being written; a file that does not
    exist yet has no records. To follow a growing file, call it repeatedly:

        for record, offset in follow(path, offset): ...
    """
    if not os.path.exists(path):
        return
    with open(path, "rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            yield json.loads(line), offset


def _repair(path: Path) -> int:
    """Remove what follows the last newline and return its length.

    The file is replaced, not truncated: a reader in the middle of the torn line would otherwise
    join it with the next line.
    """
    size = path.stat().st_size if path.exists() else 0
    if size == 0:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        complete = content.rfind(b"\n") + 1
    if complete < size:
        repaired = path.with_name(f"{path.name}.repaired")
        copyfile(path, repaired)
        with repaired.open("rb+") as copy:
            copy.truncate(complete)
            os.fsync(copy.fileno())
        repaired.replace(path)
    return size - complete


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, by strings that Python's float() and
    JavaScript's Number() both parse."""
    if isinstance(value, float) and not isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
