"""Files of JSON lines that only grow, and reading them meanwhile.

Each line is one write, so a writer that is killed has written all of a line or none of it, except
in the middle of a long one, and after a power cut. What is torn then is the last line: readers
stop before it, and the next writer takes it out.
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
    """The writer of a file, which must have no other; `torn_bytes` is what it found to repair."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn_bytes = _repair(path)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def append(self, record: dict[str, Any]) -> None:
        """Write one line. It outlives this process at once, and a power cut from `sync` on."""
        line = json.dumps(_finite(record), allow_nan=False).encode() + b"\n"
        with self._named():
            written = os.write(self._descriptor, line)
        if written < len(line):
            self.close()  # or the next line would be glued to this one
            raise OSError(errno.ENOSPC, "no room for a whole line", str(self.path))

    def sync(self) -> None:
        with self._named():
            os.fsync(self._descriptor)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """What the system says of a descriptor, said of the file."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def close(self) -> None:
        if self._descriptor >= 0:
            self.sync()
            os.close(self._descriptor)
            self._descriptor = -1  # the number will soon be another file's


def follow(path: str | Path, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """The complete records from byte `offset` on, each with the offset at which to go on after it.

    Ends where the file ends today, before a line still being written; a file that does not exist
    yet has no records. To keep watching, call it again and again:

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
    """Take out what follows the last newline; returns its length.

    The file is replaced, not shortened: a reader in the middle of the torn line would glue it to
    the line that comes next, and read what nobody wrote.
    """
    size = path.stat().st_size if path.exists() else 0
    if size == 0:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        whole = content.rfind(b"\n") + 1
    if whole < size:
        repaired = path.with_name(f"{path.name}.repaired")
        copyfile(path, repaired)
        with repaired.open("rb+") as copy:
            copy.truncate(whole)
            os.fsync(copy.fileno())
        repaired.replace(path)
    return size - whole


def _finite(value: Any) -> Any:
    """JSON has no nan and no inf: they become text that Python's float and JavaScript's Number
    both read back."""
    if isinstance(value, float) and not isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
