"""Where documents come from: folders, JSONL, Parquet, Hugging Face datasets, Python's own sources.

A source that is not there is an error; a document that cannot be used is skipped and counted.
"""

import gzip
import importlib
import json
import os
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from paddock.config import BaseSettings, RequiredFile
from paddock.data.chance import key

Kind = Literal["text", "code"]
Drops = Counter[str]  # documents left out, by reason
UNPACKING = (EOFError, OSError, zlib.error)  # what reading a damaged .gz raises


class DataError(ValueError):
    """Data that cannot be used; the message names the source or file and what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    text: str
    id: str  # within its source
    source: str
    kind: Kind = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a source reads with: how to measure text, and where to count what is left out."""

    count_tokens: Callable[[str], int]
    drops: Drops = field(default_factory=Counter)


class SourceSettings(BaseSettings):
    """What every source has. A source yields its documents in the same order every time."""

    generated: ClassVar[bool] = False  # made on purpose: not cleaned, and its own rule holds out

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]  # in mixtures and folder names

    def documents(self, reading: Reading) -> Iterator[Document]:
        raise NotImplementedError

    def data_files(self) -> tuple[RequiredFile, ...]:
        """The files and folders that it reads."""
        return ()

    def holding_out(self, share: float) -> "SourceSettings | None":  # noqa: ARG002
        """For a generated source, the one of the documents it never yields."""
        return None

    def error(self, what: str) -> DataError:
        return DataError(f"source '{self.name}': {what}")


class FolderSource(SourceSettings):
    """Files below a folder, in the order of their paths."""

    kind: Literal["folder"] = "folder"
    path: str
    patterns: tuple[str, ...] = ("**/*.txt", "**/*.md")
    holds: Kind = "text"

    def data_files(self) -> tuple[RequiredFile, ...]:
        contains = f"a folder with text files that match {' or '.join(self.patterns)}"
        return (RequiredFile(path=self.path, contains=contains),)

    def files(self) -> list[Path]:
        """The files that match, relative to the folder."""
        root = Path(self.path)
        if not root.is_dir():
            raise self.error(f"there is no folder {root}")
        found = {path for pattern in self.patterns for path in root.glob(pattern)}
        files = sorted(path.relative_to(root) for path in found if not path.is_dir())
        if not files:
            raise self.error(f"no file in {root} matches {', '.join(self.patterns)}")
        return files

    def documents(self, reading: Reading) -> Iterator[Document]:
        for file in self.files():
            text = read_text(Path(self.path) / file, reading.drops)
            if text is not None:
                yield Document(text=text, id=file.as_posix(), source=self.name, kind=self.holds)


class JsonlSource(SourceSettings):
    """One field of each line of a JSONL file, or of every one in a folder; packed (.gz) or not."""

    kind: Literal["jsonl"] = "jsonl"
    path: str
    field: str = "text"
    holds: Kind = "text"

    def data_files(self) -> tuple[RequiredFile, ...]:
        contains = f"JSONL, .gz or not, a file or a folder of them, with text in {self.field!r}"
        return (RequiredFile(path=self.path, contains=contains),)

    def documents(self, reading: Reading) -> Iterator[Document]:
        for file in files_of(self, self.path, (".jsonl", ".jsonl.gz")):
            with opened(file) as lines:
                for number, line in enumerate(_whole_lines(lines, reading.drops), 1):
                    text = _field(line, self.field, reading.drops)
                    if text is not None:
                        where = f"{file.name}:{number}"
                        yield Document(text=text, id=where, source=self.name, kind=self.holds)


class ParquetSource(SourceSettings):
    """One column of a Parquet file, or of every such file in a folder."""

    kind: Literal["parquet"] = "parquet"
    path: str
    column: str = "text"
    holds: Kind = "text"

    def data_files(self) -> tuple[RequiredFile, ...]:
        contains = f"Parquet, a file or a folder of them, with text in column {self.column!r}"
        return (RequiredFile(path=self.path, contains=contains),)

    def documents(self, reading: Reading) -> Iterator[Document]:
        parquet, arrow = _extra("pyarrow.parquet"), _extra("pyarrow")
        for file in files_of(self, self.path, (".parquet",)):
            try:
                table = parquet.ParquetFile(file)
            except (arrow.ArrowInvalid, OSError) as error:
                raise self.error(f"{file} is not Parquet: {error}") from None
            if self.column not in table.schema_arrow.names:
                there = ", ".join(table.schema_arrow.names)
                raise self.error(f"{file} has no column '{self.column}', only {there}")
            batches = table.iter_batches(columns=[self.column], batch_size=1024)
            values = (value for batch in batches for value in batch.column(0).to_pylist())
            yield from _column(values, reading.drops, file.name, self.name, self.holds)


class HubSource(SourceSettings):
    """One column of a Hugging Face dataset, by its name or by the path of a local copy. It is
    streamed, so nothing is copied and the first documents come at once."""

    kind: Literal["hub"] = "hub"
    dataset: str
    subset: str | None = None
    split: str = "train"
    column: str = "text"
    holds: Kind = "text"

    def documents(self, reading: Reading) -> Iterator[Document]:
        datasets = _extra("datasets")
        try:
            rows = datasets.load_dataset(
                self.dataset, self.subset, split=self.split, streaming=True
            )
        except (OSError, ValueError) as error:
            raise self.error(f"dataset '{self.dataset}' cannot be read: {error}") from None
        values = (row.get(self.column) for row in rows)
        yield from _column(values, reading.drops, self.split, self.name, self.holds)


class PythonSource(SourceSettings):
    """This machine's own Python sources: the standard library, then site-packages, each in an
    order that mixes packages, until `max_bytes` are read. A corpus that needs no network."""

    kind: Literal["python"] = "python"
    max_bytes: Annotated[int, Field(gt=0)] = 20_000_000

    def files(self) -> Iterator[tuple[Path, Path]]:
        """Each file with the folder its path is relative to."""
        paths = sysconfig.get_paths()
        packages = Path(paths["purelib"])
        for root in (Path(paths["stdlib"]), packages):
            found: dict[int, Path] = {}
            for folder, below, names in os.walk(root):
                below[:] = [name for name in below if name != packages.name]
                files = (Path(folder, name) for name in names if name.endswith(".py"))
                found |= {key(file.relative_to(root).as_posix()): file for file in files}
            yield from ((root, found[place]) for place in sorted(found))

    def documents(self, reading: Reading) -> Iterator[Document]:
        left = self.max_bytes
        for root, path in self.files():
            text = read_text(path, reading.drops)
            if text is None:
                continue
            left -= len(text.encode())
            if left < 0:
                return
            where = path.relative_to(root).as_posix()
            yield Document(text=text, id=where, source=self.name, kind="code")


def read_text(file: Path, drops: Drops) -> str | None:
    """The text in a file; None, and counted, if it has none that can be read."""
    try:
        content = file.read_bytes()
    except OSError:
        drops["unreadable"] += 1
        return None
    if b"\0" in content:
        drops["binary"] += 1
        return None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        drops["encoding"] += 1
        return None


def opened(file: Path) -> AbstractContextManager[Iterable[bytes]]:
    """The lines of a file, packed (.gz) or not."""
    return gzip.open(file) if file.suffix == ".gz" else file.open("rb")


def files_of(source: SourceSettings, path: str, suffixes: tuple[str, ...]) -> list[Path]:
    """A file, or every file below a folder that ends in one of the suffixes."""
    here = Path(path)
    files = sorted(here.rglob("*")) if here.is_dir() else [here]
    if not here.exists():
        raise source.error(f"there is no file or folder {here}")
    found = [file for file in files if file.name.endswith(suffixes) or file == here]
    if not found:
        raise source.error(f"no file in {here} ends in {' or '.join(suffixes)}")
    return found


def _whole_lines(lines: Iterable[bytes], drops: Drops) -> Iterator[bytes]:
    """The lines of a file that may have been cut off while it was packed, or damaged since."""
    try:
        yield from lines
    except UNPACKING:
        drops["truncated file"] += 1


def _field(line: bytes, field: str, drops: Drops) -> str | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # the latter of a line that is nested too deeply
        drops["malformed"] += 1
        return None
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        drops[f"no text in '{field}'"] += 1
        return None
    return text


def _column(
    values: Iterable[Any], drops: Drops, where: str, source: str, kind: Kind
) -> Iterator[Document]:
    for number, text in enumerate(values):
        if isinstance(text, str):
            yield Document(text=text, id=f"{where}:{number}", source=source, kind=kind)
        else:
            drops["no text"] += 1


def _extra(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError:
        library = module.split(".")[0]
        raise DataError(
            f"this source needs the '{library}' library: pip install 'paddock[data]'"
        ) from None


FileSource = FolderSource | JsonlSource | ParquetSource | HubSource | PythonSource
