"""Session-affine routing: a session stays on one rank, which has its prefix in the KV cache.

Rendezvous hashing (paddock.http.rendezvous): a rank's share of all sessions, its part of the hash
space, is its share of the weights. Removing a rank moves only its sessions; a changed weight moves
only sessions of ranks that lost share.

- A session stays on its rank for as long as that rank is alive.
- Load guard: a new session skips ranks that it would fill above `guard` times the mean load.
- Rebalancing: ranks above the mean load lose hash space to the others; from a rank above `hot`
  times the mean, the sessions at the border of its hash space move, as few as necessary.

Load is the number of tokens that sessions hold in a rank's KV cache. Routers with the same ranks
and weights agree; `state` and `merge_state` transfer weights and assignments between them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paddock.http import ranks_by_preference, rendezvous_scores

MIN_WEIGHT, MAX_WEIGHT = 0.25, 4.0  # of the mean weight


class NoRankAvailableError(Exception):
    """No rank is left to serve a session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRouterState:
    """State that one router passes to another."""

    epoch: int  # number of weight changes
    weights: Mapping[str, float]
    assignments: Mapping[str, str]  # rank of each session
    session_tokens: Mapping[str, float]  # tokens of each session


class SessionRouter:
    def __init__(self, ranks: Iterable[str] = (), *, guard: float = 1.1, hot: float = 1.15) -> None:
        if not 1.0 < guard <= hot:
            raise ValueError(f"expected 1 < guard <= hot, got guard {guard} and hot {hot}")
        self.guard, self.hot, self.epoch = guard, hot, 0
        self.weights: dict[str, float] = dict.fromkeys(ranks, 1.0)
        self.assignments: dict[str, str] = {}
        self._tokens: dict[str, float] = {}  # tokens of each session
        self._sessions: dict[str, set[str]] = {rank: set() for rank in self.weights}
        self._loads: dict[str, float] = dict.fromkeys(self.weights, 0.0)

    @property
    def ranks(self) -> tuple[str, ...]:
        return tuple(self.weights)

    @property
    def loads(self) -> Mapping[str, float]:
        """Tokens that each rank's sessions hold."""
        return self._loads

    # --- sessions ---------------------------------------------------------------------------------

    def route(self, session: str, tokens: float = 1.0) -> str:
        """The rank of the session's next turn, which will hold about `tokens`."""
        if not self.weights:
            raise NoRankAvailableError("no rank is alive")
        rank = self.assignments.get(session)
        if rank is None:
            rank = self._choose_rank(session, tokens)
            self._pin(session, rank)
        self.update_load(session, tokens)
        return rank

    def update_load(self, session: str, tokens: float) -> None:
        """Set the number of tokens that the session holds."""
        rank = self.assignments.get(session)
        if rank is not None:
            self._loads[rank] += tokens - self._tokens.get(session, 0.0)
            self._tokens[session] = tokens

    def end(self, session: str) -> None:
        """The session is over: drop its assignment and load."""
        self._unpin(session)
        self._tokens.pop(session, None)

    def reassign(self, session: str) -> None:
        """Move the session to another rank, if there is one: its rank is alive but fails."""
        rank = self.assignments.get(session)
        if rank is not None and len(self.weights) > 1:
            self._unpin(session)
            others = {name: weight for name, weight in self.weights.items() if name != rank}
            self._pin(session, ranks_by_preference(session, others)[0])

    def _choose_rank(self, session: str, tokens: float) -> str:
        order = ranks_by_preference(session, self.weights)
        limit = self.guard * (sum(self._loads.values()) + tokens) / len(order)
        fitting = (rank for rank in order if self._loads[rank] + tokens <= limit)
        # If none fits, one session exceeds a fair share: it goes to the least loaded rank.
        return next(fitting, min(order, key=lambda rank: self._loads[rank]))

    def _pin(self, session: str, rank: str) -> None:
        self.assignments[session] = rank
        self._sessions[rank].add(session)
        self._loads[rank] += self._tokens.get(session, 0.0)

    def _unpin(self, session: str) -> None:
        rank = self.assignments.pop(session, None)
        if rank is not None:
            self._sessions[rank].discard(session)
            self._loads[rank] -= self._tokens.get(session, 0.0)

    # --- ranks ------------------------------------------------------------------------------------

    def join(self, rank: str) -> None:
        """Add a rank with its share of the hash space. Assigned sessions stay where they are until
        rebalancing moves them."""
        if rank not in self.weights:
            self.weights[rank] = sum(self.weights.values()) / max(1, len(self.weights)) or 1.0
            self._sessions[rank], self._loads[rank] = set(), 0.0
            self.epoch += 1

    def leave(self, rank: str) -> tuple[str, ...]:
        """Remove a rank; returns its sessions, whose next turn assigns them another rank."""
        if rank not in self.weights:
            return ()
        moved = tuple(sorted(self._sessions[rank]))
        for session in moved:
            self._unpin(session)
        del self.weights[rank], self._sessions[rank], self._loads[rank]
        self.epoch += 1
        return moved

    def rebalance(self, busy: Iterable[str] = ()) -> tuple[str, ...]:
        """Give hash space to ranks below the mean load, and move sessions away from hot ranks;
        returns the moved sessions. Sessions with running requests (`busy`) stay."""
        mean = sum(self._loads.values()) / max(1, len(self._loads))
        if mean <= 0 or max(self._loads.values()) <= self.guard * mean:
            return ()
        for rank, load in self._loads.items():
            step = min(1.25, max(0.8, (mean / max(load, 1e-9)) ** 0.5))
            self.weights[rank] *= step
        scale = len(self.weights) / sum(self.weights.values())
        self.weights = {
            rank: min(MAX_WEIGHT, max(MIN_WEIGHT, weight * scale))
            for rank, weight in self.weights.items()
        }
        self.epoch += 1
        busy_sessions = frozenset(busy)
        hot = [rank for rank, load in self._loads.items() if load > self.hot * mean]
        return tuple(s for rank in hot for s in self._relieve(rank, mean, busy_sessions))

    def _relieve(self, rank: str, mean: float, busy: frozenset[str]) -> list[str]:
        """Move sessions at the border of a rank's hash space until it is no longer hot."""
        border = []
        for session in self._sessions[rank] - busy:
            scores = rendezvous_scores(session, self.weights)
            own = scores.pop(rank)
            if scores:
                border.append((own / min(scores.values()), session))
        moved = []
        for _, session in sorted(border, reverse=True):
            if self._loads[rank] <= self.guard * mean:
                break
            tokens = self._tokens.get(session, 0.0)
            others = [r for r in ranks_by_preference(session, self.weights) if r != rank]
            target = next((r for r in others if self._loads[r] + tokens <= self.guard * mean), None)
            if target is not None and tokens > 0:
                self._unpin(session)
                self._pin(session, target)
                moved.append(session)
        return moved

    # --- several routers --------------------------------------------------------------------------

    def state(self) -> SessionRouterState:
        return SessionRouterState(
            epoch=self.epoch,
            weights=dict(self.weights),
            assignments=dict(self.assignments),
            session_tokens=dict(self._tokens),
        )

    def merge_state(self, other: SessionRouterState) -> None:
        """Merge the state of another router. In conflicts the higher epoch wins."""
        is_newer = other.epoch > self.epoch
        if is_newer:
            for rank in set(self.weights) - set(other.weights):
                self.leave(rank)
            for rank in other.weights:
                self.join(rank)
            self.weights, self.epoch = dict(other.weights), other.epoch
        for session, rank in other.assignments.items():
            if rank in self.weights and (is_newer or session not in self.assignments):
                self._unpin(session)
                self._tokens[session] = other.session_tokens.get(session, 0.0)
                self._pin(session, rank)
