"""Tokenized shards on disk: memory-mapped .bin/.idx files and a manifest.

NAME.bin holds the token ids of a shard's documents, little-endian, two or four bytes each; NAME.idx
the offset of each document and the end, as 64-bit integers. Rows of dialogues also have NAME.trn,
the loss mask with one byte per token, and NAME.wgt, the loss weight of each row. File sizes and
offsets are checked when a corpus is opened, token ids when they are read.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paddock.data.sources import DataError
from paddock.text import Tokenizer

MANIFEST_NAME = "manifest.json"
FORMAT: Final = 1

_REBUILD = "delete the corpus folder to build it again"

Split = Literal["train", "held_out"]
Count = Annotated[int, Field(ge=0)]


class _Entry(BaseModel):
    # manifest.json keeps its own key names, by alias.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)


class Shard(_Entry):
    name: str  # file name without suffix
    documents: Count
    tokens: Count
    # Whether there are .trn and .wgt files.
    has_loss_mask: bool = Field(
        default=False, validation_alias="lessons", serialization_alias="lessons"
    )


class SourceManifest(_Entry):
    """Counts and shards of one source."""

    documents: Count
    bytes: Count  # UTF-8 size of the documents
    # Dropped documents, by reason.
    drop_counts: dict[str, Count] = Field(validation_alias="drops", serialization_alias="drops")
    splits: dict[Split, tuple[Shard, ...]]


class CorpusManifest(_Entry):
    format: Literal[1] = FORMAT
    key: str  # corpus_key of the settings and the tokenizer
    tokenizer: str  # fingerprint
    vocab_size: Count
    sources: dict[str, SourceManifest]

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        return np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")


class ShardWriter:
    """Writes the documents of one split into shards of about `tokens_per_shard` tokens."""

    def __init__(
        self,
        folder: Path,
        split: Split,
        *,
        dtype: np.dtype[np.unsignedinteger],
        tokens_per_shard: int,
    ) -> None:
        self._folder, self._split = folder, split
        self._dtype, self._tokens_per_shard = dtype, tokens_per_shard
        self._done: list[Shard] = []
        self._file: BinaryIO | None = None
        self._loss_mask, self._weights = bytearray(), list[float]()
        self._offsets = [0]

    def add(
        self, ids: Sequence[int], loss_mask: Sequence[bool] | None = None, weight: float = 1.0
    ) -> None:
        """Add a document. Either all documents of a writer have a loss mask or none has."""
        if self._file is None:
            self._file = (self._folder / f"{self._name}.bin").open("wb")
        assert ids, "a document without tokens"
        self._file.write(np.asarray(ids, self._dtype).tobytes())
        self._offsets.append(self._offsets[-1] + len(ids))
        if loss_mask is not None:
            assert len(loss_mask) == len(ids), (len(loss_mask), len(ids))
            self._loss_mask += bytes(loss_mask)
            self._weights.append(weight)
        if self._offsets[-1] >= self._tokens_per_shard:
            self._finish_shard()

    def close(self) -> tuple[Shard, ...]:
        self._finish_shard()
        return tuple(self._done)

    @property
    def _name(self) -> str:
        return f"{self._split}-{len(self._done):05d}"

    def _finish_shard(self) -> None:
        if self._file is None:
            return
        self._file.close()
        (self._folder / f"{self._name}.idx").write_bytes(np.array(self._offsets, "<u8").tobytes())
        documents, tokens, masked = len(self._offsets) - 1, self._offsets[-1], bool(self._weights)
        if masked:
            (self._folder / f"{self._name}.trn").write_bytes(self._loss_mask)
            (self._folder / f"{self._name}.wgt").write_bytes(
                np.array(self._weights, "<f4").tobytes()
            )
        shard = Shard(name=self._name, documents=documents, tokens=tokens, has_loss_mask=masked)
        self._done.append(shard)
        self._file, self._offsets = None, [0]
        self._loss_mask, self._weights = bytearray(), []


class IndexedDataset:
    """Memory-mapped documents of one source and split."""

    def __init__(self, folder: Path, shards: Sequence[Shard], manifest: CorpusManifest) -> None:
        self._manifest = manifest
        self._folder = folder
        self._tokens = [
            _memmap(folder / f"{shard.name}.bin", manifest.dtype, shard.tokens) for shard in shards
        ]
        self._offsets = [
            _memmap(folder / f"{shard.name}.idx", np.dtype("<u8"), shard.documents + 1)
            for shard in shards
        ]
        self._loss_masks = [
            _memmap(folder / f"{shard.name}.trn", np.dtype("u1"), shard.tokens)
            if shard.has_loss_mask
            else None
            for shard in shards
        ]
        self._weights = [
            _memmap(folder / f"{shard.name}.wgt", np.dtype("<f4"), shard.documents)
            if shard.has_loss_mask
            else None
            for shard in shards
        ]
        for shard, offsets in zip(shards, self._offsets, strict=True):
            increasing = bool((np.diff(offsets.astype(np.int64)) > 0).all())
            if offsets[0] != 0 or offsets[-1] != shard.tokens or not increasing:
                raise DataError(f"{folder / shard.name}.idx is corrupt; {_REBUILD}")
        self._ends = list(accumulate(shard.documents for shard in shards))
        self.tokens = sum(shard.tokens for shard in shards)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def length(self, number: int) -> int:
        shard, i = self._find(number)
        return int(self._offsets[shard][i + 1] - self._offsets[shard][i])

    def token_ids(self, number: int, start: int, stop: int) -> NDArray[np.unsignedinteger]:
        """Token ids `start` to `stop` (exclusive) of a document."""
        shard, i = self._find(number)
        begin = int(self._offsets[shard][i])
        found = self._tokens[shard][begin + start : begin + stop]
        if len(found) and int(found.max()) >= self._manifest.vocab_size:
            raise DataError(
                f"document {number} in {self._folder} has token id {found.max()}, but the "
                f"vocabulary has {self._manifest.vocab_size} tokens; {_REBUILD}"
            )
        return found

    def loss_mask(self, number: int, start: int, stop: int) -> NDArray[np.bool_]:
        """Loss mask of those tokens; all true for plain text."""
        shard, i = self._find(number)
        found = self._loss_masks[shard]
        if found is None:
            return np.ones(stop - start, np.bool_)
        begin = int(self._offsets[shard][i])
        return found[begin + start : begin + stop].astype(np.bool_)

    def loss_weight(self, number: int) -> float:
        """Loss weight of the tokens of a document."""
        shard, i = self._find(number)
        found = self._weights[shard]
        return 1.0 if found is None else float(found[i])

    def mean_length(self, *, at_most: int | None = None) -> float:
        """Mean tokens per document, each counted up to `at_most`."""
        limit = at_most or np.iinfo(np.int64).max
        sums = [int(np.minimum(np.diff(o.astype(np.int64)), limit).sum()) for o in self._offsets]
        return sum(sums) / max(1, len(self))

    def _find(self, number: int) -> tuple[int, int]:
        assert 0 <= number < len(self), (number, len(self))
        shard = bisect_right(self._ends, number)
        return shard, number - (self._ends[shard - 1] if shard else 0)


class Corpus:
    """An existing corpus, opened with the tokenizer it was built with."""

    def __init__(self, folder: str | Path, *, tokenizer: Tokenizer) -> None:
        self.folder = Path(folder)
        self.manifest = _manifest(self.folder / MANIFEST_NAME)
        if self.manifest.tokenizer != tokenizer.fingerprint:
            raise DataError(
                f"{folder} was built with tokenizer {self.manifest.tokenizer} "
                f"({self.manifest.vocab_size} tokens), not with {tokenizer.fingerprint} "
                f"('{tokenizer.name}', {tokenizer.vocab_size} tokens)"
            )

    def documents(self, source: str, split: Split = "train") -> IndexedDataset:
        if source not in self.manifest.sources:
            names = ", ".join(self.manifest.sources)
            raise DataError(f"{self.folder} has no source '{source}'; its sources are {names}")
        shards = self.manifest.sources[source].splits.get(split, ())
        return IndexedDataset(self.folder / source, shards, self.manifest)

    def split(self, split: Split) -> dict[str, IndexedDataset]:
        """All sources that have documents in the split."""
        found = {name: self.documents(name, split) for name in self.manifest.sources}
        return {name: documents for name, documents in found.items() if len(documents)}


def _manifest(file: Path) -> CorpusManifest:
    try:
        return CorpusManifest.model_validate_json(file.read_bytes())
    except OSError as error:
        raise DataError(f"{file.parent} is not a corpus folder: {error.strerror}") from None
    except ValidationError as error:
        raise DataError(f"{file} is not a manifest of format {FORMAT}: {error}") from None


def _memmap(file: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    try:
        size = file.stat().st_size
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}; {_REBUILD}") from None
    if size != count * dtype.itemsize:
        raise DataError(
            f"{file} has {size} bytes, expected {count * dtype.itemsize}: it was truncated or "
            f"overwritten; {_REBUILD}"
        )
    return np.memmap(file, dtype, mode="r", shape=(count,))
