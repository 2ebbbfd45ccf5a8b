"""Weighted mixture of document sources, with weights that may change over the run."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import isfinite
from typing import Literal

from pydantic import Field, model_validator

from paddock.config import BaseSettings
from paddock.data.rng import derive_seed, permute_index, uniform_at
from paddock.data.shards import IndexedDataset
from paddock.data.sources import DataError

WeightSchedule = tuple[tuple[float, float], ...]  # (progress, weight), linear in between


class MixtureSettings(BaseSettings):
    """Weight of each source: a number, or a piecewise linear schedule over progress (0 to 1). Two
    points at the same progress are a jump. Without weights, sources are sampled by their size.

    facts = [[0, 0.75], [0.3, 0.75], [0.3, 0.15], [1, 0.15]]
    """

    weights: dict[str, float | WeightSchedule] = Field(default_factory=dict)
    unit: Literal["tokens", "documents"] = "tokens"  # what the weights are fractions of

    @model_validator(mode="after")
    def _weights_are_weights(self) -> "MixtureSettings":
        for name, weight in self.weights.items():
            points = weight if isinstance(weight, tuple) else ((0.0, weight),)
            if not points or any(not isfinite(w) or w < 0 for _, w in points):
                raise ValueError(f"the weight of '{name}' must be finite and not negative")
            if any(a > b for (a, _), (b, _) in pairwise(points)):
                raise ValueError(f"the points of '{name}' must be sorted by progress")
        return self


@dataclass(frozen=True, slots=True)
class DocumentSpan:
    """Tokens `start` to `stop` (exclusive) of a document."""

    source: str
    document: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def split_at(self, max_tokens: int) -> tuple["DocumentSpan", "DocumentSpan | None"]:
        """The first `max_tokens` tokens, and the rest if there is one.

        >>> DocumentSpan("code", 7, 0, 5).split_at(3)[1]
        DocumentSpan(source='code', document=7, start=3, stop=5)
        """
        if len(self) <= max_tokens:
            return self, None
        middle = self.start + max_tokens
        return (
            DocumentSpan(self.source, self.document, self.start, middle),
            DocumentSpan(self.source, self.document, middle, self.stop),
        )

    def chunks(self, max_tokens: int) -> list["DocumentSpan"]:
        """Spans of `max_tokens` tokens; the last may be shorter."""
        starts = range(self.start, self.stop, max_tokens)
        return [
            DocumentSpan(self.source, self.document, a, min(a + max_tokens, self.stop))
            for a in starts
        ]


class Mixture:
    """An endless sequence of documents; each source is reshuffled every epoch.

    The state is the number of documents taken of each source: together with the seed it determines
    the next document.
    """

    def __init__(
        self,
        documents: Mapping[str, IndexedDataset],
        settings: MixtureSettings,
        *,
        seed: int,
        at_most: int | None = None,
    ) -> None:
        """`at_most`: longer documents are counted with this many tokens in the token weights."""
        unknown = sorted(set(settings.weights) - set(documents))
        if unknown:
            names = ", ".join(documents) or "none"
            raise DataError(f"weights: source '{unknown[0]}' not found; the corpus has {names}")
        self._documents = {name: found for name, found in documents.items() if len(found)}
        if not self._documents:
            raise DataError("no source of the mixture has any documents")
        self._schedules = _schedules(self._documents, settings)
        self._size = {
            name: found.mean_length(at_most=at_most) if settings.unit == "tokens" else 1.0
            for name, found in self._documents.items()
        }
        self._seed = seed
        self.taken = dict.fromkeys(self._documents, 0)

    def next_document(self, progress: float) -> DocumentSpan:
        """The next whole document."""
        source = self._source(progress)
        found, taken = self._documents[source], self.taken[source]
        epoch, position = divmod(taken, len(found))
        number = permute_index(position, len(found), derive_seed(self._seed, source, epoch))
        self.taken[source] = taken + 1
        return DocumentSpan(source, number, 0, found.length(number))

    def epochs(self) -> dict[str, float]:
        """Number of passes over each source."""
        return {name: taken / len(self._documents[name]) for name, taken in self.taken.items()}

    def sizes(self) -> dict[str, int]:
        return {name: len(found) for name, found in self._documents.items()}

    def _source(self, progress: float) -> str:
        rates = [weight_at(self._schedules[s], progress) / self._size[s] for s in self._documents]
        ends = list(accumulate(rates))
        if ends[-1] <= 0:
            raise DataError(f"all weights of the mixture are zero at progress {progress:g}")
        point = uniform_at(derive_seed(self._seed, "source"), sum(self.taken.values())) * ends[-1]
        return list(self._documents)[bisect_right(ends, point)]


def weight_at(schedule: Sequence[tuple[float, float]], progress: float) -> float:
    """The weight at a progress, by linear interpolation.

    >>> [weight_at(((0, 4), (0.5, 2), (0.5, 0), (1, 1)), p) for p in (0, 0.25, 0.5, 0.75, 2)]
    [4.0, 3.0, 0.0, 0.5, 1]
    """
    after = bisect_right([at for at, _ in schedule], progress)
    if after in (0, len(schedule)):
        return schedule[max(0, after - 1)][1]
    (left, low), (right, high) = schedule[after - 1 : after + 1]
    return low + (high - low) * (progress - left) / (right - left)


def _schedules(
    documents: Mapping[str, IndexedDataset], settings: MixtureSettings
) -> dict[str, WeightSchedule]:
    if settings.weights:
        weights = {name: settings.weights.get(name, 0.0) for name in documents}
    elif settings.unit == "tokens":
        weights = {name: float(found.tokens) for name, found in documents.items()}
    else:
        weights = {name: float(len(found)) for name, found in documents.items()}
    return {
        name: weight if isinstance(weight, tuple) else ((0.0, weight),)
        for name, weight in weights.items()
    }
