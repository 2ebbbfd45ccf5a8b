"""Rows of JSONL files or JSON lists, plain or gzip, and of Parquet files."""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class RowError(ValueError):
    """An invalid file or row; the message says where."""


@dataclass(frozen=True, slots=True)
class JsonRow:
    """One object of a file, with its location."""

    where: str  # "train.jsonl:17"
    fields: dict[str, Any]

    def get_text(self, *names: str) -> str:
        """The first of these fields that exists, with "\\n" line ends."""
        for name in names:
            if name in self.fields:
                found = self.fields[name]
                if not isinstance(found, str):
                    raise RowError(f"{self.where}: {name!r} must be a string, got {found!r}")
                return found.replace("\r\n", "\n")
        raise RowError(f"{self.where}: {' or '.join(map(repr, names))} is missing")

    def get_texts(self, name: str) -> tuple[str, ...]:
        """A field that is a list of strings; empty if it does not exist."""
        found = self.fields.get(name, [])
        if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
            raise RowError(f"{self.where}: {name!r} must be a list of strings")
        return tuple(entry.replace("\r\n", "\n") for entry in found)


def read_rows(path: str | Path) -> Iterator[JsonRow]:
    """Read the rows of a file in order."""
    file = Path(path)
    if file.suffix == ".parquet":
        yield from _read_parquet(file)
        return
    try:
        raw = file.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise RowError(f"cannot read {file}: {error}") from None
    if text.lstrip().startswith("["):
        for number, entry in enumerate(_json(str(file), text), start=1):
            yield _row(f"{file.name}[{number}]", entry)
        return
    for line_number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{file.name}:{line_number}"
            yield _row(where, _json(where, line))


def _read_parquet(file: Path) -> Iterator[JsonRow]:
    """Rows as JSON has them: what JSON does not know, such as a date, as its text."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise RowError(f"{file} needs pyarrow: pip install 'paddock[data]'") from None
    try:
        number = 0
        for batch in parquet.ParquetFile(file).iter_batches():
            for entry in batch.to_pylist():
                number += 1
                fields = json.loads(json.dumps(entry, default=str))
                yield JsonRow(f"{file.name}[{number}]", fields)
    except (OSError, ArrowException) as error:
        raise RowError(f"cannot read {file}: {error}") from None


def _json(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{where}: not JSON: {error}") from None


def _row(where: str, entry: Any) -> JsonRow:
    if not isinstance(entry, dict):
        raise RowError(f"{where}: not an object")
    return JsonRow(where, entry)
