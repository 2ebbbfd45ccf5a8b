"""Rendezvous (highest-random-weight) hashing of sessions onto ranks.

Every rank gets a pseudo-random number for the session. With weights the number is exponentially
distributed with the weight as its rate and the smallest wins, so a rank's share of all sessions is
its share of the weights. Removing a rank moves only its own sessions; changing a weight moves only
sessions of ranks that lost share.
"""

from collections.abc import Mapping
from hashlib import blake2b
from math import log


def rendezvous_order(session: str, replicas: int) -> list[int]:
    """The replica numbers, the preferred one first. Removing the last replica moves only its
    sessions.

    >>> rendezvous_order("a", 3) == rendezvous_order("a", 3), sorted(rendezvous_order("a", 3))
    (True, [0, 1, 2])
    """

    def score(replica: int) -> bytes:
        return _digest(f"{session}\0{replica}")

    return sorted(range(replicas), key=score, reverse=True)


def rendezvous_hash(session: str, rank: str) -> float:
    """A number in (0, 1), the same in every process.

    >>> rendezvous_hash("s1", "a") == rendezvous_hash("s1", "a")
    True
    >>> rendezvous_hash("s1", "2a") == rendezvous_hash("s12", "a")
    False
    """
    bits = int.from_bytes(_digest(f"{len(session)}:{session}:{rank}"), "little") >> 11
    return (bits + 0.5) / 2**53


def rendezvous_scores(session: str, weights: Mapping[str, float]) -> dict[str, float]:
    """The score of each rank; the smallest wins the session."""
    return {rank: -log(rendezvous_hash(session, rank)) / weight for rank, weight in weights.items()}


def ranks_by_preference(session: str, weights: Mapping[str, float]) -> list[str]:
    """The ranks, the preferred one first.

    >>> before = ranks_by_preference("s1", {"a": 1.0, "b": 1.0, "c": 1.0})
    >>> ranks_by_preference("s1", {rank: 1.0 for rank in before[1:]}) == before[1:]
    True
    """
    scores = rendezvous_scores(session, weights)
    return sorted(scores, key=lambda rank: (scores[rank], rank))


def _digest(key: str) -> bytes:
    return blake2b(key.encode(), digest_size=8).digest()
