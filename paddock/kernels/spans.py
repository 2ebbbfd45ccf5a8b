"""Spans: which keys the queries of a packed step attend to.

A step packs the new tokens of several sequences into one row of T queries. A `Span` is one
sequence's share: its queries, and the contiguous range of keys of the sequence up to and including
those queries. Training has as many queries as keys in each span; a decode step has one query.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Queries [query, query + queries) see keys [key, key + keys): the last query all of them,
    the one before it all but the last, and so on.

    >>> Span(query=0, queries=2, key=10, keys=5).past
    3
    """

    query: int
    queries: int
    key: int
    keys: int

    def __post_init__(self) -> None:
        if not 0 < self.queries <= self.keys:
            raise ValueError(f"a span needs 0 < queries <= keys, got {self}")

    @property
    def past(self) -> int:
        """Number of cached keys before the first query of this span."""
        return self.keys - self.queries

    @property
    def query_slice(self) -> slice:
        return slice(self.query, self.query + self.queries)

    @property
    def key_slice(self) -> slice:
        return slice(self.key, self.key + self.keys)

    def part(self, start: int, stop: int) -> "Span":
        """The span of queries [start, stop) of this one, with the keys they may see.

        >>> Span(query=4, queries=3, key=0, keys=7).part(1, 2)
        Span(query=5, queries=1, key=0, keys=6)
        """
        return Span(self.query + start, stop - start, self.key, self.past + stop)
