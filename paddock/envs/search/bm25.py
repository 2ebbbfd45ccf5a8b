"""BM25 index over pages, in memory or in a folder, extended batch by batch.

Each batch of pages is a segment: arrays that are written once, memory-mapped and never changed. A
search uses the statistics of all segments together, so the results do not depend on how the pages
were batched. `compact` merges the segments into one.

P postings, T terms, N pages of a segment.
"""

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

K1, B = 1.2, 0.75  # term-frequency saturation and length normalization, the usual values


class PageError(ValueError):
    """A page or an index folder that cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebPage:
    id: str
    title: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchHit:
    page: WebPage
    score: float
    excerpt: str


def tokenize_words(text: str) -> list[str]:
    """Lower-case words of a text.

    >>> tokenize_words("The town's river, 1901.")
    ['the', 'town', 's', 'river', '1901']
    """
    return re.findall(r"\w+", text.lower())


@dataclass(frozen=True, slots=True)
class _Segment:
    terms: dict[str, int]
    start_T1: NDArray[np.int64]  # offset of each term's postings, and the end
    page_P: NDArray[np.int32]
    count_P: NDArray[np.int32]
    length_N: NDArray[np.int32]
    pages: tuple[WebPage, ...]

    def postings(self, term: str) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        at = self.terms.get(term)
        if at is None:
            return self.page_P[:0], self.count_P[:0]
        span = slice(int(self.start_T1[at]), int(self.start_T1[at + 1]))
        return self.page_P[span], self.count_P[span]


class BM25Index:
    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = Path(folder) if folder else None
        self._segments: list[_Segment] = []
        self._pages: list[WebPage] = []  # of all segments, in order
        self._by_id: dict[str, WebPage] = {}
        self._words = 0
        if self._folder:
            self._folder.mkdir(parents=True, exist_ok=True)
        for part in self._segment_folders():
            self._append(_load(part))

    def __len__(self) -> int:
        return len(self._pages)

    def page(self, page_id: str) -> WebPage | None:
        return self._by_id.get(page_id)

    def add(self, pages: Iterable[WebPage]) -> None:
        """Index new pages; they are searchable, and on disk, when this returns."""
        batch = tuple(pages)
        ids = Counter(page.id for page in batch)
        for page_id, times in ids.items():
            if times > 1 or page_id in self._by_id:
                raise PageError(f"page {page_id!r} is already in the index")
        if batch:
            self._append(self._save(_build_segment(batch)))

    def compact(self) -> None:
        """Merge all segments into one; search results stay the same."""
        if len(self._segments) < 2:
            return
        old = self._segment_folders()
        merged = self._save(_build_segment(self._pages))
        self._segments, self._pages, self._by_id, self._words = [], [], {}, 0
        self._append(merged)
        for part in old:
            shutil.rmtree(part)

    def search(self, query: str, k: int = 5) -> list[SearchHit]:
        """The `k` best pages; ties go to the page that was added first."""
        total = len(self._pages)
        if not total:
            return []
        terms = Counter(tokenize_words(query))
        idf = {}
        for term in terms:
            matching = sum(len(segment.postings(term)[0]) for segment in self._segments)
            idf[term] = math.log(1 + (total - matching + 0.5) / (matching + 0.5))
        mean = self._words / total
        scores_N = np.concatenate([_scores(s, terms, idf, mean) for s in self._segments])
        return [
            SearchHit(
                page=self._pages[at],
                score=float(scores_N[at]),
                excerpt=excerpt(self._pages[at].text, terms),
            )
            for at in _top_k(scores_N, k)
        ]

    def _append(self, segment: _Segment) -> None:
        self._segments.append(segment)
        self._pages += segment.pages
        self._by_id |= {page.id: page for page in segment.pages}
        self._words += int(segment.length_N.sum())

    def _save(self, segment: _Segment) -> _Segment:
        if self._folder:
            parts = self._segment_folders()
            number = int(parts[-1].name) + 1 if parts else 1
            _save(segment, self._folder / f"{number:06d}")
        return segment

    def _segment_folders(self) -> list[Path]:
        # The name of a segment that is still being written begins with a dot.
        return sorted(self._folder.glob("[0-9]*")) if self._folder else []


def _top_k(scores_N: NDArray[np.float64], k: int) -> list[int]:
    """Indices of the `k` highest positive scores; ties go to the lower index."""
    if k < len(scores_N):
        threshold = np.partition(scores_N, -k)[-k]
        indices = np.flatnonzero(scores_N >= max(threshold, np.finfo(float).tiny))
    else:
        indices = np.flatnonzero(scores_N > 0)
    order = np.argsort(-scores_N[indices], kind="stable")[:k]
    return [int(index) for index in indices[order]]


def _scores(
    segment: _Segment, terms: Counter[str], idf: dict[str, float], mean_length: float
) -> NDArray[np.float64]:
    scores_N = np.zeros(len(segment.pages))
    norm_N = K1 * (1 - B + B * segment.length_N / mean_length)
    for term, times in terms.items():
        page_P, count_P = segment.postings(term)
        saturated_P = count_P * (K1 + 1) / (count_P + norm_N[page_P])
        scores_N[page_P] += times * idf[term] * saturated_P
    return scores_N


def _build_segment(pages: Sequence[WebPage]) -> _Segment:
    counts = [Counter(tokenize_words(f"{page.title} {page.text}")) for page in pages]
    postings: dict[str, list[tuple[int, int]]] = {}
    for at, count in enumerate(counts):
        for term, times in count.items():
            postings.setdefault(term, []).append((at, times))
    terms = sorted(postings)
    flat = np.array([pair for term in terms for pair in postings[term]], np.int32).reshape(-1, 2)
    return _Segment(
        terms={term: at for at, term in enumerate(terms)},
        start_T1=np.cumsum([0, *(len(postings[term]) for term in terms)]),
        page_P=np.ascontiguousarray(flat[:, 0]),
        count_P=np.ascontiguousarray(flat[:, 1]),
        length_N=np.array([count.total() for count in counts], np.int32),
        pages=tuple(pages),
    )


_ARRAYS = ("start_T1", "page_P", "count_P", "length_N")


def _save(segment: _Segment, part: Path) -> None:
    """Atomic: written to a temporary folder, then renamed."""
    draft = part.with_name(f".{part.name}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    for name in _ARRAYS:
        np.save(draft / f"{name}.npy", getattr(segment, name), allow_pickle=False)
    (draft / "terms.json").write_text(json.dumps(list(segment.terms)))
    lines = [json.dumps(asdict(page)) for page in segment.pages]
    (draft / "pages.jsonl").write_text("\n".join(lines))
    draft.rename(part)


def _load(part: Path) -> _Segment:
    try:
        arrays = [np.load(part / f"{n}.npy", mmap_mode="r", allow_pickle=False) for n in _ARRAYS]
        terms = json.loads((part / "terms.json").read_text())
        lines = (part / "pages.jsonl").read_text().split("\n")
        pages = tuple(WebPage(**json.loads(line)) for line in lines)
    except (OSError, ValueError, TypeError) as error:
        raise PageError(f"{part} is not an index segment: {error}") from None
    start_T1, page_P, count_P, length_N = arrays
    by_term = {term: at for at, term in enumerate(terms)}
    return _Segment(by_term, start_T1, page_P, count_P, length_N, pages)


def excerpt(text: str, terms: Iterable[str], width: int = 160) -> str:
    """The sentence with the most of the terms, cut to `width` characters.

    >>> excerpt("One is red. Two is blue. Three is red.", ["blue"])
    'Two is blue.'
    """
    wanted = set(terms)
    sentences = re.split(r"(?<=[.!?])\s+", text.strip())
    best = max(sentences, key=lambda sentence: len(wanted.intersection(tokenize_words(sentence))))
    return best if len(best) <= width else f"{best[:width]}..."
