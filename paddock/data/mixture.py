"""Which document comes next: several sources, by weights that may change as a run proceeds."""

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

WeightSchedule = tuple[tuple[float, float], ...]  # (progress, weight), straight lines between


class MixtureSettings(BaseSettings):
    """Weights by source, each a number or a curve over the progress of the run, 0 to 1. Two points
    at the same progress are a jump. Without weights every source gets what it has.

    facts = [[0, 0.75], [0.3, 0.75], [0.3, 0.15], [1, 0.15]]
    """

    weights: dict[str, float | WeightSchedule] = Field(default_factory=dict)
    unit: Literal["tokens", "documents"] = "tokens"  # what the weights are shares of

    @model_validator(mode="after")
    def _weights_are_weights(self) -> "MixtureSettings":
        for name, weight in self.weights.items():
            points = weight if isinstance(weight, tuple) else ((0.0, weight),)
            if not points or any(not isfinite(w) or w < 0 for _, w in points):
                raise ValueError(f"the weight of '{name}' must be zero or more at every point")
            if any(a > b for (a, _), (b, _) in pairwise(points)):
                raise ValueError(f"the points of '{name}' must be in the order of progress")
        return self


@dataclass(frozen=True, slots=True)
class DocumentSpan:
    """Tokens `start` to before `stop` of a document."""

    source: str
    document: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def split_at(self, room: int) -> tuple["DocumentSpan", "DocumentSpan | None"]:
        """At most `room` tokens, and what is left.

        >>> DocumentSpan("code", 7, 0, 5).split_at(3)[1]
        Piece(source='code', document=7, start=3, stop=5)
        """
        if len(self) <= room:
            return self, None
        middle = self.start + room
        return (
            DocumentSpan(self.source, self.document, self.start, middle),
            DocumentSpan(self.source, self.document, middle, self.stop),
        )

    def chunks(self, room: int) -> list["DocumentSpan"]:
        """In pieces of `room` tokens, the last of what is left."""
        starts = range(self.start, self.stop, room)
        return [
            DocumentSpan(self.source, self.document, a, min(a + room, self.stop)) for a in starts
        ]


class Mixture:
    """An endless sequence of documents: each source in an order of its own, another every epoch.

    Where it stands is how many documents were taken of each source. Given that and a seed, the
    next document is computed, never looked up.
    """

    def __init__(
        self,
        documents: Mapping[str, IndexedDataset],
        settings: MixtureSettings,
        *,
        seed: int,
        at_most: int | None = None,
    ) -> None:
        """`at_most`: of a longer document only this many tokens will be used."""
        unknown = sorted(set(settings.weights) - set(documents))
        if unknown:
            there = ", ".join(documents) or "none"
            raise DataError(f"weights name a source '{unknown[0]}'; there are {there}")
        self._documents = {name: found for name, found in documents.items() if len(found)}
        if not self._documents:
            raise DataError("there is no document in any source of the mixture")
        self._curves = _curves(self._documents, settings)
        self._size = {
            name: found.mean_length(at_most=at_most) if settings.unit == "tokens" else 1.0
            for name, found in self._documents.items()
        }
        self._seed = seed
        self.taken = dict.fromkeys(self._documents, 0)

    def next_document(self, progress: float) -> DocumentSpan:
        """The next document, whole."""
        source = self._source(progress)
        found, taken = self._documents[source], self.taken[source]
        epoch, position = divmod(taken, len(found))
        number = permute_index(position, len(found), derive_seed(self._seed, source, epoch))
        self.taken[source] = taken + 1
        return DocumentSpan(source, number, 0, found.length(number))

    def epochs(self) -> dict[str, float]:
        """How often each source was gone through."""
        return {name: taken / len(self._documents[name]) for name, taken in self.taken.items()}

    def sizes(self) -> dict[str, int]:
        return {name: len(found) for name, found in self._documents.items()}

    def _source(self, progress: float) -> str:
        rates = [weight_at(self._curves[s], progress) / self._size[s] for s in self._documents]
        ends = list(accumulate(rates))
        if ends[-1] <= 0:
            raise DataError(f"all weights of the mixture are zero at progress {progress:g}")
        place = uniform_at(derive_seed(self._seed, "source"), sum(self.taken.values())) * ends[-1]
        return list(self._documents)[bisect_right(ends, place)]


def weight_at(curve: Sequence[tuple[float, float]], progress: float) -> float:
    """
    >>> [weight_at(((0, 4), (0.5, 2), (0.5, 0), (1, 1)), p) for p in (0, 0.25, 0.5, 0.75, 2)]
    [4.0, 3.0, 0.0, 0.5, 1]
    """
    after = bisect_right([at for at, _ in curve], progress)
    if after in (0, len(curve)):
        return curve[max(0, after - 1)][1]
    (left, low), (right, high) = curve[after - 1 : after + 1]
    return low + (high - low) * (progress - left) / (right - left)


def _curves(
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
