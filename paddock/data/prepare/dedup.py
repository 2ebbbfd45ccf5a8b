"""Copies, exact and near.

MinHash with banding, in plain numpy, so that the default corpus needs no extra library. Signatures
are kept in memory, a few KB a document: for corpora of millions, not of billions.
"""

import re
from collections import defaultdict
from hashlib import blake2b
from typing import Annotated
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from paddock.config import BaseSettings

_WORDS = re.compile(r"\w+|[^\w\s]")
_CHUNK = 4096  # shingles at a time: the table of hashes stays in the cache
_ODD = np.uint64(0x9E3779B97F4A7C15)


class DedupSettings(BaseSettings):
    exact: bool = True
    minhash: bool = True
    # Share of shingles in common (Jaccard) from which on texts are copies.
    similarity_threshold: Annotated[float, Field(gt=0, le=1)] = 0.8
    ngram_words: PositiveInt = 5
    bands: PositiveInt = 16  # 16 x 8 hashes find what is 0.8 similar 95 times in 100
    rows_per_band: PositiveInt = 8


class MinHashDeduplicator:
    """The documents kept so far."""

    def __init__(self, rules: DedupSettings) -> None:
        self._rules = rules
        self._digests: set[bytes] = set()
        self._signatures: list[NDArray[np.uint32]] = []
        self._bands: defaultdict[tuple[int, bytes], list[int]] = defaultdict(list)
        hashes = rules.bands * rules.rows_per_band
        chance = np.random.Generator(np.random.PCG64(hashes))
        self._scale, self._shift = chance.integers(0, 2**64, (2, hashes, 1), dtype=np.uint64)
        self._scale |= np.uint64(1)

    def duplicate_reason(self, text: str) -> str | None:
        """Why this document should be left out; None, and remembered, if it is new."""
        if self._rules.exact:
            digest = blake2b(text.strip().encode(), digest_size=12).digest()
            if digest in self._digests:
                return "exact copy"
            self._digests.add(digest)
        if self._rules.minhash:
            signature = self.signature(text)
            if self._near(signature):
                return "near copy"
            self._remember(signature)
        return None

    def signature(self, text: str) -> NDArray[np.uint32]:
        """Hashes of which the share that two texts have in common estimates their similarity."""
        shingles = _shingles(text, self._rules.ngram_words)
        least = np.full(len(self._scale), 2**32 - 1, np.uint32)
        for start in range(0, len(shingles), _CHUNK):
            mixed = shingles[None, start : start + _CHUNK] * self._scale + self._shift
            np.minimum(least, (mixed >> np.uint64(32)).astype(np.uint32).min(axis=1), out=least)
        return least

    def _near(self, signature: NDArray[np.uint32]) -> bool:
        others = {i for band in self._keys(signature) for i in self._bands.get(band, ())}
        same = ((self._signatures[i] == signature).mean() for i in sorted(others))
        return any(share >= self._rules.similarity_threshold for share in same)

    def _remember(self, signature: NDArray[np.uint32]) -> None:
        for band in self._keys(signature):
            self._bands[band].append(len(self._signatures))
        self._signatures.append(signature)

    def _keys(self, signature: NDArray[np.uint32]) -> list[tuple[int, bytes]]:
        rows = signature.reshape(self._rules.bands, self._rules.rows_per_band)
        digests = (blake2b(row.tobytes(), digest_size=8).digest() for row in rows)
        return list(enumerate(digests))


def _shingles(text: str, words: int) -> NDArray[np.uint64]:
    """One hash for each different run of `words` words; of all the words, if there are fewer."""
    hashes = np.array([crc32(word.encode()) for word in _WORDS.findall(text)], np.uint64)
    width = min(words, len(hashes))
    runs = np.zeros(len(hashes) - width + 1, np.uint64)
    for i in range(width):
        runs = (runs ^ (runs >> np.uint64(29)) ^ hashes[i : len(hashes) - width + 1 + i]) * _ODD
    return np.unique(runs)
