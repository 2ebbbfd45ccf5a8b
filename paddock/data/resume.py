"""Where a stream stands, small enough for every checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from paddock.data.corpus import DataError
from paddock.data.mixture import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Everything that decides what comes next, given the same documents and settings.

    Nothing of it depends on the number of ranks. Pieces that wait are references, not tokens.
    """

    made: Mapping[str, int | str]  # what the stream was built with, so that another is refused
    sizes: Mapping[str, int]  # documents in each source
    taken: Mapping[str, int]  # documents taken of each source, over all epochs
    waiting: Sequence[Piece]
    counts: Mapping[str, int]  # for the record: batches, tokens, what was cut

    def to_json(self) -> dict[str, Any]:
        names = list(self.sizes)
        return {
            "made": dict(self.made),
            "sizes": dict(self.sizes),
            "taken": dict(self.taken),
            "waiting": [[names.index(p.source), p.document, p.start, p.stop] for p in self.waiting],
            "counts": dict(self.counts),
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Self:
        try:
            names = list(state["sizes"])
            waiting = [
                Piece(names[source], document, start, stop)
                for source, document, start, stop in state["waiting"]
            ]
            parts = {name: dict(state[name]) for name in ("made", "sizes", "taken", "counts")}
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(f"this is not the position of a data stream: {error!r}") from None
        return cls(waiting=waiting, **parts)

    def check(self, *, made: Mapping[str, int | str], sizes: Mapping[str, int]) -> None:
        """DataError if this is a position in another stream."""
        for what, here, there in (("", made, self.made), ("documents of ", sizes, self.sizes)):
            for name in {**there, **here}:
                if here.get(name) != there.get(name):
                    raise DataError(
                        f"the position belongs to another data stream: {what}{name} "
                        f"was {there.get(name)} and is {here.get(name)}"
                    )
