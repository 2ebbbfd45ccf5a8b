"""Document sources: text folders, JSONL, Parquet, Hugging Face datasets, installed Python files.

A missing source raises `DataError`; an unusable document is skipped and counted by reason.
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
from paddock.data.rng import derive_seed

ContentType = Literal["text", "code"]
DropCounts = Counter[str]  # dropped documents, by reason
DECOMPRESSION_ERRORS = (EOFError, OSError, zlib.error)  # raised when context a damaged .gz


class DataError(ValueError):
    """Unusable data; the message names the source or file and the problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    text: str
    id: str  # within its source
    source: str
    content_type: ContentType = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceContext:
    """What a source needs to produce documents: a token counter and the drop counts to update."""

    count_tokens: Callable[[str], int]
    drop_counts: DropCounts = field(default_factory=Counter)


class SourceSettings(BaseSettings):
    """Base settings of a source. Documents come in the same order on every pass."""

    # Generated sources skip cleaning and deduplication, and define their own held-out set.
    is_generated: ClassVar[bool] = False

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]  # in mixtures and folder names

    def documents(self, context: SourceContext) -> Iterator[Document]:
        raise NotImplementedError

    def data_files(self) -> tuple[RequiredFile, ...]:
        """Files and folders that this source reads."""
        return ()

    def held_out_source(self, share: float) -> "SourceSettings | None":  # noqa: ARG002
        """For a generated source, the source of its held-out documents; else None."""
        return None

    def error(self, what: str) -> DataError:
        return DataError(f"source '{self.name}': {what}")


class FolderSource(SourceSettings):
    """Files under a folder that match `glob_patterns`, sorted by path."""

    kind: Literal["folder"] = "folder"
    path: str
    glob_patterns: tuple[str, ...] = ("**/*.txt", "**/*.md")
    content_type: ContentType = "text"

    def data_files(self) -> tuple[RequiredFile, ...]:
        contains = f"a folder with text files that match {' or '.join(self.glob_patterns)}"
        return (RequiredFile(path=self.path, contains=contains),)

    def files(self) -> list[Path]:
        """Matching files, relative to the folder."""
        root = Path(self.path)
        if not root.is_dir():
            raise self.error(f"folder {root} not found")
        found = {path for pattern in self.glob_patterns for path in root.glob(pattern)}
        files = sorted(path.relative_to(root) for path in found if not path.is_dir())
        if not files:
            raise self.error(f"no file in {root} matches {', '.join(self.glob_patterns)}")
        return files

    def documents(self, context: SourceContext) -> Iterator[Document]:
        for file in self.files():
            text = read_text(Path(self.path) / file, context.drop_counts)
            if text is not None:
                yield Document(
                    text=text, id=file.as_posix(), source=self.name, content_type=self.content_type
                )


class JsonlSource(SourceSettings):
    """One field per line of a JSONL file, or of all JSONL files in a folder (.jsonl, .jsonl.gz)."""

    kind: Literal["jsonl"] = "jsonl"
    path: str
    text_field: str = "text"
    content_type: ContentType = "text"

    def data_files(self) -> tuple[RequiredFile, ...]:
        contains = (
            f"JSONL (.gz or not), one file or a folder of files, with text in {self.text_field!r}"
        )
        return (RequiredFile(path=self.path, contains=contains),)

    def documents(self, context: SourceContext) -> Iterator[Document]:
        for file in list_files(self, self.path, (".jsonl", ".jsonl.gz")):
            with open_lines(file) as lines:
                for number, line in enumerate(_whole_lines(lines, context.drop_counts), 1):
                    text = _field(line, self.text_field, context.drop_counts)
                    if text is not None:
                        where = f"{file.name}:{number}"
                        yield Document(
                            text=text, id=where, source=self.name, content_type=self.content_type
                        )


class ParquetSource(SourceSettings):
    """One column of a Parquet file, or of every such file in a folder."""

    kind: Literal["parquet"] = "parquet"
    path: str
    text_column: str = "text"
    content_type: ContentType = "text"

    def data_files(self) -> tuple[RequiredFile, ...]:
        contains = (
            f"Parquet, one file or a folder of files, with text in column {self.text_column!r}"
        )
        return (RequiredFile(path=self.path, contains=contains),)

    def documents(self, context: SourceContext) -> Iterator[Document]:
        parquet, arrow = _extra("pyarrow.parquet"), _extra("pyarrow")
        for file in list_files(self, self.path, (".parquet",)):
            try:
                table = parquet.ParquetFile(file)
            except (arrow.ArrowInvalid, OSError) as error:
                raise self.error(f"{file} is not Parquet: {error}") from None
            if self.text_column not in table.schema_arrow.names:
                columns = ", ".join(table.schema_arrow.names)
                raise self.error(
                    f"{file} has no column '{self.text_column}'; its columns are {columns}"
                )
            batches = table.iter_batches(columns=[self.text_column], batch_size=1024)
            values = (value for batch in batches for value in batch.column(0).to_pylist())
            yield from _column(values, context.drop_counts, file.name, self.name, self.content_type)


class HubSource(SourceSettings):
    """One column of a Hugging Face dataset, by name or local path, read in streaming mode."""

    kind: Literal["hub"] = "hub"
    dataset: str
    subset: str | None = None
    split: str = "train"
    text_column: str = "text"
    content_type: ContentType = "text"

    def documents(self, context: SourceContext) -> Iterator[Document]:
        datasets = _extra("datasets")
        try:
            rows = datasets.load_dataset(
                self.dataset, self.subset, split=self.split, streaming=True
            )
        except (OSError, ValueError) as error:
            raise self.error(f"dataset '{self.dataset}' cannot be read: {error}") from None
        values = (row.get(self.text_column) for row in rows)
        yield from _column(values, context.drop_counts, self.split, self.name, self.content_type)


class PythonSource(SourceSettings):
    """Python files of this installation: the standard library, then site-packages, each shuffled
    by a hash of the path, up to `max_bytes`. Needs no network."""

    kind: Literal["python"] = "python"
    max_bytes: Annotated[int, Field(gt=0)] = 20_000_000

    def files(self) -> Iterator[tuple[Path, Path]]:
        """Pairs of root folder and file."""
        paths = sysconfig.get_paths()
        packages = Path(paths["purelib"])
        for root in (Path(paths["stdlib"]), packages):
            found: dict[int, Path] = {}
            for folder, below, names in os.walk(root):
                below[:] = [name for name in below if name != packages.name]
                files = (Path(folder, name) for name in names if name.endswith(".py"))
                found |= {derive_seed(file.relative_to(root).as_posix()): file for file in files}
            yield from ((root, found[key]) for key in sorted(found))

    def documents(self, context: SourceContext) -> Iterator[Document]:
        left = self.max_bytes
        for root, path in self.files():
            text = read_text(path, context.drop_counts)
            if text is None:
                continue
            left -= len(text.encode())
            if left < 0:
                return
            where = path.relative_to(root).as_posix()
            yield Document(text=text, id=where, source=self.name, content_type="code")


def read_text(file: Path, drops: DropCounts) -> str | None:
    """Text of a file; None, with the reason counted, if it cannot be read as UTF-8 text."""
    try:
        content = file.read_bytes()
    except OSError:
        drops["unreadable file"] += 1
        return None
    if b"\0" in content:
        drops["binary"] += 1
        return None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        drops["invalid encoding"] += 1
        return None


def open_lines(file: Path) -> AbstractContextManager[Iterable[bytes]]:
    """Open a file for context lines of bytes, decompressing .gz."""
    return gzip.open(file) if file.suffix == ".gz" else file.open("rb")


def list_files(source: SourceSettings, path: str, suffixes: tuple[str, ...]) -> list[Path]:
    """The file at `path`, or all files below it whose names end in one of the suffixes."""
    here = Path(path)
    files = sorted(here.rglob("*")) if here.is_dir() else [here]
    if not here.exists():
        raise source.error(f"file or folder {here} not found")
    found = [file for file in files if file.name.endswith(suffixes) or file == here]
    if not found:
        raise source.error(f"no file in {here} ends in {' or '.join(suffixes)}")
    return found


def _whole_lines(lines: Iterable[bytes], drops: DropCounts) -> Iterator[bytes]:
    """Lines up to the first decompression error: a .gz file may be truncated or damaged."""
    try:
        yield from lines
    except DECOMPRESSION_ERRORS:
        drops["truncated file"] += 1


def _field(line: bytes, field: str, drops: DropCounts) -> str | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # RecursionError: nested too deeply
        drops["malformed"] += 1
        return None
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        drops[f"no text in '{field}'"] += 1
        return None
    return text


def _column(
    values: Iterable[Any], drops: DropCounts, where: str, source: str, kind: ContentType
) -> Iterator[Document]:
    for number, text in enumerate(values):
        if isinstance(text, str):
            yield Document(text=text, id=f"{where}:{number}", source=source, content_type=kind)
        else:
            drops["no text"] += 1


def _extra(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError:
        library = module.split(".")[0]
        raise DataError(
            f"this source needs the library '{library}': pip install 'paddock[data]'"
        ) from None


FileSource = FolderSource | JsonlSource | ParquetSource | HubSource | PythonSource
