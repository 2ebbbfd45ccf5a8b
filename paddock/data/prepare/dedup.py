"""Exact and MinHash near-duplicate removal.

MinHash with banding in plain numpy, so that the default corpus needs no extra library. Signatures
are kept in memory, a few KB per document: suited to millions of documents, not to billions.
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
_CHUNK = 4096  # n-grams at a time: the table of hashes stays in the CPU cache
_ODD = np.uint64(0x9E3779B97F4A7C15)


class DedupSettings(BaseSettings):
    exact: bool = True
    minhash: bool = True
    # Jaccard similarity of n-grams from which on texts are duplicates.
    similarity_threshold: Annotated[float, Field(gt=0, le=1)] = 0.8
    ngram_words: PositiveInt = 5
    bands: PositiveInt = 16  # 16 x 8 hashes find pairs of similarity 0.8 with probability 0.95
    rows_per_band: PositiveInt = 8


class MinHashDeduplicator:
    """Signatures of the documents seen so far."""

    def __init__(self, settings: DedupSettings) -> None:
        self._settings = settings
        self._digests: set[bytes] = set()
        self._signatures: list[NDArray[np.uint32]] = []
        self._bands: defaultdict[tuple[int, bytes], list[int]] = defaultdict(list)
        hashes = settings.bands * settings.rows_per_band
        rng = np.random.Generator(np.random.PCG64(hashes))
        self._scale, self._shift = rng.integers(0, 2**64, (2, hashes, 1), dtype=np.uint64)
        self._scale |= np.uint64(1)

    def duplicate_reason(self, text: str) -> str | None:
        """Why the document is a duplicate; None if it is new, which is then remembered."""
        if self._settings.exact:
            digest = blake2b(text.strip().encode(), digest_size=12).digest()
            if digest in self._digests:
                return "exact copy"
            self._digests.add(digest)
        if self._settings.minhash:
            signature = self.signature(text)
            if self._near(signature):
                return "near copy"
            self._remember(signature)
        return None

    def signature(self, text: str) -> NDArray[np.uint32]:
        """MinHash signature: the fraction of equal entries estimates the Jaccard similarity."""
        ngrams = _ngrams(text, self._settings.ngram_words)
        minima = np.full(len(self._scale), 2**32 - 1, np.uint32)
        for start in range(0, len(ngrams), _CHUNK):
            mixed = ngrams[None, start : start + _CHUNK] * self._scale + self._shift
            np.minimum(minima, (mixed >> np.uint64(32)).astype(np.uint32).min(axis=1), out=minima)
        return minima

    def _near(self, signature: NDArray[np.uint32]) -> bool:
        others = {i for band in self._keys(signature) for i in self._bands.get(band, ())}
        same = ((self._signatures[i] == signature).mean() for i in sorted(others))
        return any(share >= self._settings.similarity_threshold for share in same)

    def _remember(self, signature: NDArray[np.uint32]) -> None:
        for band in self._keys(signature):
            self._bands[band].append(len(self._signatures))
        self._signatures.append(signature)

    def _keys(self, signature: NDArray[np.uint32]) -> list[tuple[int, bytes]]:
        rows = signature.reshape(self._settings.bands, self._settings.rows_per_band)
        digests = (blake2b(row.tobytes(), digest_size=8).digest() for row in rows)
        return list(enumerate(digests))


def _ngrams(text: str, words: int) -> NDArray[np.uint64]:
    """One hash per distinct n-gram of `words` words; a shorter text is one n-gram."""
    hashes = np.array([crc32(word.encode()) for word in _WORDS.findall(text)], np.uint64)
    width = min(words, len(hashes))
    runs = np.zeros(len(hashes) - width + 1, np.uint64)
    for i in range(width):
        runs = (runs ^ (runs >> np.uint64(29)) ^ hashes[i : len(hashes) - width + 1 + i]) * _ODD
    return np.unique(runs)
