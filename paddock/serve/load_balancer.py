"""Load balancer over engine replicas, with session affinity by rendezvous hashing.

A session keeps its replica, and with it its prefix cache. A replica that is much busier than the
least loaded one is skipped. Requests without a session go to the least loaded replica.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count

from paddock.engine import Engine
from paddock.http import rendezvous_order
from paddock.records import ApiError


def is_overloaded(load: int, min_load: int, *, max_running: int) -> bool:
    """Whether a replica with `load` requests is so much busier than the least loaded one that its
    prefix cache is not worth the wait.

    >>> is_overloaded(40, 0, max_running=32), is_overloaded(31, 0, max_running=32)
    (True, False)
    >>> is_overloaded(40, 30, max_running=32)
    False
    """
    return load >= max(max_running, 2 * min_load)


class ReplicaLoadBalancer:
    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = tuple(engines)
        self.loads = [0] * len(engines)  # running and waiting requests
        self._round_robin = count()

    def __len__(self) -> int:
        return len(self.engines)

    def select_replica(self, session: str | None, replica: int | None) -> int:
        """The requested replica, else that of the session, else the least loaded one."""
        if replica is not None:
            if not 0 <= replica < len(self):
                raise ApiError(
                    f"routed_dp_rank must be in [0, {len(self)}), got {replica}",
                    param="routed_dp_rank",
                )
            return replica
        min_load = min(self.loads)
        if session is None:
            idle = [i for i, load in enumerate(self.loads) if load == min_load]
            return idle[next(self._round_robin) % len(idle)]
        order = rendezvous_order(session, len(self))
        max_running = self.engines[0].settings.max_running_requests
        candidates = (
            i for i in order if not is_overloaded(self.loads[i], min_load, max_running=max_running)
        )
        return next(candidates, order[0])

    @contextmanager
    def reserve(self, replica: int, requests: int) -> Iterator[Engine]:
        """The engine of a replica, with `requests` added to its load until the block ends."""
        engine = self.engines[replica]
        max_requests = engine.settings.max_queued_requests + engine.settings.max_running_requests
        if self.loads[replica] + requests > max_requests:
            raise ApiError(
                f"server overloaded: {self.loads[replica]} requests are running or waiting, "
                f"at most {max_requests} are allowed",
                status=503,
                code="overloaded",
            )
        self.loads[replica] += requests
        try:
            yield engine
        finally:
            self.loads[replica] -= requests
