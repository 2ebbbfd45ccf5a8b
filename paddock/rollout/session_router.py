"""Which rank a session is served by, so that its prefix is cached where it is asked for.

Rendezvous hashing: every rank draws a number for the session, the smallest has it. A draw is
exponential with the rank's weight as its rate, so a rank's share of all sessions, its part of the
hash space, is its share of the weights. Losing a rank moves only its sessions; a changed weight
moves only sessions of ranks that lost share.

- A session stays where it was put for as long as that rank lives.
- The guard: a new session passes over ranks that it would make fuller than `guard` times the mean.
- Rebalancing: ranks with more than the mean lose hash space to the others; from a rank above `hot`
  times the mean, sessions at the border of its space move, as few as bring it back below.

Load is what sessions hold in a rank's cache, in tokens. Routers that know the same ranks and
weights agree; `state` and `adopt` carry weights and detours from one to another.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paddock.http import ranks_by_preference, rendezvous_scores

MIN_WEIGHT, MAX_WEIGHT = 0.25, 4.0  # of the mean weight


class NoRankAvailableError(Exception):
    """There is nobody left to serve a session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRouterState:
    """What one router tells another."""

    epoch: int  # how often weights have changed
    weights: Mapping[str, float]
    assignments: Mapping[str, str]  # of sessions, where they are
    session_tokens: Mapping[str, float]  # of sessions, how many tokens


class SessionRouter:
    def __init__(self, ranks: Iterable[str] = (), *, guard: float = 1.1, hot: float = 1.15) -> None:
        if not 1.0 < guard <= hot:
            raise ValueError(f"guard {guard} and hot {hot} are not 1 < guard <= hot")
        self.guard, self.hot, self.epoch = guard, hot, 0
        self.weights: dict[str, float] = dict.fromkeys(ranks, 1.0)
        self.assignments: dict[str, str] = {}
        self._held: dict[str, float] = {}  # tokens of each session
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
        """Where the session's next turn goes, in which it will hold about `tokens`."""
        if not self.weights:
            raise NoRankAvailableError("no rank is alive")
        rank = self.assignments.get(session)
        if rank is None:
            rank = self._chosen(session, tokens)
            self._pin(session, rank)
        self.update_load(session, tokens)
        return rank

    def update_load(self, session: str, tokens: float) -> None:
        """The session holds this much now."""
        rank = self.assignments.get(session)
        if rank is not None:
            self._loads[rank] += tokens - self._held.get(session, 0.0)
            self._held[session] = tokens

    def end(self, session: str) -> None:
        """The session asks no more."""
        self._unpin(session)
        self._held.pop(session, None)

    def reassign(self, session: str) -> None:
        """Put the session elsewhere, if there is an elsewhere: its rank lives but fails it."""
        rank = self.assignments.get(session)
        if rank is not None and len(self.weights) > 1:
            self._unpin(session)
            others = {name: weight for name, weight in self.weights.items() if name != rank}
            self._pin(session, ranks_by_preference(session, others)[0])

    def _chosen(self, session: str, tokens: float) -> str:
        order = ranks_by_preference(session, self.weights)
        most = self.guard * (sum(self._loads.values()) + tokens) / len(order)
        fits = (rank for rank in order if self._loads[rank] + tokens <= most)
        # Where none fits, one session is larger than a fair share: it goes where most room is.
        return next(fits, min(order, key=lambda rank: self._loads[rank]))

    def _pin(self, session: str, rank: str) -> None:
        self.assignments[session] = rank
        self._sessions[rank].add(session)
        self._loads[rank] += self._held.get(session, 0.0)

    def _unpin(self, session: str) -> None:
        rank = self.assignments.pop(session, None)
        if rank is not None:
            self._sessions[rank].discard(session)
            self._loads[rank] -= self._held.get(session, 0.0)

    # --- ranks ------------------------------------------------------------------------------------

    def join(self, rank: str) -> None:
        """A new rank gets its share of the hash space. Sessions that are elsewhere stay there, but
        for those that rebalancing moves."""
        if rank not in self.weights:
            self.weights[rank] = sum(self.weights.values()) / max(1, len(self.weights)) or 1.0
            self._sessions[rank], self._loads[rank] = set(), 0.0
            self.epoch += 1

    def leave(self, rank: str) -> tuple[str, ...]:
        """A rank is gone; its sessions, which their next turn puts elsewhere."""
        if rank not in self.weights:
            return ()
        moved = tuple(sorted(self._sessions[rank]))
        for session in moved:
            self._unpin(session)
        del self.weights[rank], self._sessions[rank], self._loads[rank]
        self.epoch += 1
        return moved

    def rebalance(self, busy: Iterable[str] = ()) -> tuple[str, ...]:
        """Give hash space to ranks with less than the mean, and move what must move; the sessions
        that moved. Those that are `busy`, being answered just now, stay."""
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
        stays = frozenset(busy)
        hot = [rank for rank, load in self._loads.items() if load > self.hot * mean]
        return tuple(s for rank in hot for s in self._relieve(rank, mean, stays))

    def _relieve(self, rank: str, mean: float, busy: frozenset[str]) -> list[str]:
        """Move sessions away from the border of a rank's space until it is not hot any more."""
        border = []
        for session in self._sessions[rank] - busy:
            found = rendezvous_scores(session, self.weights)
            own = found.pop(rank)
            if found:
                border.append((own / min(found.values()), session))
        moved = []
        for _, session in sorted(border, reverse=True):
            if self._loads[rank] <= self.guard * mean:
                break
            tokens = self._held.get(session, 0.0)
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
            session_tokens=dict(self._held),
        )

    def merge_state(self, other: SessionRouterState) -> None:
        """Take over what another router knows. Where both know something, whoever has changed
        weights more often is believed."""
        later = other.epoch > self.epoch
        if later:
            for rank in set(self.weights) - set(other.weights):
                self.leave(rank)
            for rank in other.weights:
                self.join(rank)
            self.weights, self.epoch = dict(other.weights), other.epoch
        for session, rank in other.assignments.items():
            if rank in self.weights and (later or session not in self.assignments):
                self._unpin(session)
                self._held[session] = other.session_tokens.get(session, 0.0)
                self._pin(session, rank)
