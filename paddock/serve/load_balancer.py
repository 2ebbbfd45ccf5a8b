"""Several engines behind one door, and who answers which session.

A session keeps its replica, hence its prefix cache, by rendezvous hashing: each replica draws a
number for the session, the highest has it. A replica that is much busier than the least busy is
passed over. Whoever has no session goes to the least busy.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count

from paddock.engine import Engine
from paddock.http import rendezvous_order
from paddock.records import ApiError


def is_overloaded(load: int, least: int, *, room: int) -> bool:
    """Whether a replica with `load` requests, of which it can run `room` at once, has so many more
    than the least busy that its cache is not worth the wait.

    >>> is_overloaded(40, 0, room=32), is_overloaded(31, 0, room=32), is_overloaded(40, 30, room=32)
    (True, False, False)
    """
    return load >= max(room, 2 * least)


class ReplicaLoadBalancer:
    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = tuple(engines)
        self.loads = [0] * len(engines)  # requests being answered
        self._turn = count()

    def __len__(self) -> int:
        return len(self.engines)

    def select_replica(self, session: str | None, replica: int | None) -> int:
        """Which replica answers: the one that is asked for, else the session's, else the idlest."""
        if replica is not None:
            if not 0 <= replica < len(self):
                raise ApiError(
                    f"routed_dp_rank: {replica} is not in [0, {len(self)})", param="routed_dp_rank"
                )
            return replica
        least = min(self.loads)
        if session is None:
            idle = [i for i, load in enumerate(self.loads) if load == least]
            return idle[next(self._turn) % len(idle)]
        order = rendezvous_order(session, len(self))
        room = self.engines[0].settings.max_running_requests
        fit = (i for i in order if not is_overloaded(self.loads[i], least, room=room))
        return next(fit, order[0])

    @contextmanager
    def reserve(self, replica: int, requests: int) -> Iterator[Engine]:
        """The engine, known to be busy with so many more requests until the block ends."""
        engine = self.engines[replica]
        most = engine.settings.max_queued_requests + engine.settings.max_running_requests
        if self.loads[replica] + requests > most:
            raise ApiError(
                f"{self.loads[replica]} requests are waiting or running already, of at most {most}",
                status=503,
                code="overloaded",
            )
        self.loads[replica] += requests
        try:
            yield engine
        finally:
            self.loads[replica] -= requests
