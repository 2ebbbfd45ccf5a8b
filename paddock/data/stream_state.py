"""Where a stream stands, small enough for every checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from paddock.data.mixture import DocumentSpan
from paddock.data.sources import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """Everything that decides what comes next, given the same documents and settings.

    Nothing of it depends on the number of ranks. Pieces that wait are references, not tokens.
    """

    built_with: Mapping[
        str, int | str
    ]  # what the stream was built with, so that another is refused
    sizes: Mapping[str, int]  # documents in each source
    documents_taken: Mapping[str, int]  # documents taken of each source, over all epochs
    carried_over: Sequence[DocumentSpan]
    counts: Mapping[str, int]  # for the record: batches, tokens, what was cut

    def to_json(self) -> dict[str, Any]:
        names = list(self.sizes)
        return {
            "made": dict(self.built_with),
            "sizes": dict(self.sizes),
            "taken": dict(self.documents_taken),
            "waiting": [
                [names.index(p.source), p.document, p.start, p.stop] for p in self.carried_over
            ],
            "counts": dict(self.counts),
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Self:
        try:
            names = list(state["sizes"])
            waiting = [
                DocumentSpan(names[source], document, start, stop)
                for source, document, start, stop in state["waiting"]
            ]
            fields = {
                "built_with": dict(state["made"]),
                "sizes": dict(state["sizes"]),
                "documents_taken": dict(state["taken"]),
                "counts": dict(state["counts"]),
            }
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(f"this is not the position of a data stream: {error!r}") from None
        return cls(carried_over=waiting, **fields)

    def check(self, *, made: Mapping[str, int | str], sizes: Mapping[str, int]) -> None:
        """DataError if this is a position in another stream."""
        for what, here, there in (
            ("", made, self.built_with),
            ("documents of ", sizes, self.sizes),
        ):
            for name in {**there, **here}:
                if here.get(name) != there.get(name):
                    raise DataError(
                        f"the position belongs to another data stream: {what}{name} "
                        f"was {there.get(name)} and is {here.get(name)}"
                    )
