"""Dataloader state, small enough to store in every checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from paddock.data.mixture import DocumentSpan
from paddock.data.sources import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """Everything that determines the next batches, given the same documents and settings.

    It does not depend on the number of ranks. Carried-over spans are references, not tokens.
    """

    built_with: Mapping[
        str, int | str
    ]  # what the stream was built with, so that another is refused
    sizes: Mapping[str, int]  # documents per source
    documents_taken: Mapping[str, int]  # per source, over all epochs
    carried_over: Sequence[DocumentSpan]
    counts: Mapping[str, int]  # statistics: batches, tokens, dropped tokens

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
            carried_over = [
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
            raise DataError(f"not the state of a dataloader: {error!r}") from None
        return cls(carried_over=carried_over, **fields)

    def check(self, *, built_with: Mapping[str, int | str], sizes: Mapping[str, int]) -> None:
        """Raise DataError if this is the state of a different dataloader."""
        for what, here, there in (
            ("", built_with, self.built_with),
            ("documents of ", sizes, self.sizes),
        ):
            for name in {**there, **here}:
                if here.get(name) != there.get(name):
                    raise DataError(
                        f"the state belongs to another dataloader: {what}{name} "
                        f"was {there.get(name)} and is {here.get(name)}"
                    )
