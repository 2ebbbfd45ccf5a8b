"""Routing on a replayed trace: how much of what could be found in a cache is found, and how evenly
ranks are loaded.

    python -m benchmarks.rl_routing [--ranks 8] [--sessions 2000]

A trace is made up by chance: sessions of an agent, a heavy tail of turns and of tokens a turn, as
many at once as said; the next begins when one ends. No engine runs. A rank's cache holds what its
sessions hold and is never too small, so that what is measured is routing alone: the prompt tokens
of a turn that its rank has read before, of those that a single endless cache would have. Peers in
the same run: rendezvous hashing without guard or rebalancing, and taking turns. Half way through
one rank is lost, and comes back later.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Self

from benchmarks.table import Claim, print_claims
from paddock.rollout.session_router import SessionRouter, ranks_by_preference

EVERY = 40  # turns between two looks at the balance


@dataclass(frozen=True)
class Turn:
    session: str
    prompt: int  # tokens, all that came before included
    reply: int
    last: bool


@dataclass(frozen=True)
class Trace:
    turns: list[Turn]

    @classmethod
    def made_up(cls, *, sessions: int, concurrent: int, seed: int) -> Self:
        chance, turns = Random(seed), []
        waiting = [cls._session(chance, i) for i in range(sessions)]
        running = [waiting.pop() for _ in range(min(concurrent, len(waiting)))]
        while running:
            at = chance.randrange(len(running))
            turns.append(running[at].pop(0))
            if not running[at]:
                running.pop(at)
                running += [waiting.pop()] if waiting else []
        return cls(turns)

    @staticmethod
    def _session(chance: Random, number: int) -> list[Turn]:
        count = min(200, max(1, round(chance.lognormvariate(2.5, 0.7))))
        found, tokens = [], 600  # a system prompt and tools
        for turn in range(count):
            prompt = tokens + round(chance.lognormvariate(5.5, 0.8))
            reply = round(chance.lognormvariate(5.5, 0.8))
            found.append(Turn(f"sums-{number}", prompt, reply, turn == count - 1))
            tokens = prompt + reply
        return found


@dataclass
class Outcome:
    found: int = 0
    ideal: int = 0
    read: dict[str, int] = field(default_factory=dict)  # tokens computed by each rank
    loads: list[float] = field(default_factory=list)  # most held over mean, look by look
    moved: int = 0

    @property
    def affinity(self) -> float:
        return self.found / max(1, self.ideal)

    @property
    def busiest(self) -> float:
        """The mean, over the run, of the fullest rank's load over the mean rank's."""
        return sum(self.loads) / max(1, len(self.loads))


Choose = Callable[[SessionRouter, Turn, int], str]


def ours(router: SessionRouter, turn: Turn, number: int) -> str:
    if number % EVERY == 0:
        router.rebalance()
    return router.route(turn.session, turn.prompt + turn.reply)


def hashing(router: SessionRouter, turn: Turn, _number: int) -> str:
    return ranks_by_preference(turn.session, dict.fromkeys(router.ranks, 1.0))[0]


def taking_turns(router: SessionRouter, _turn: Turn, number: int) -> str:
    return router.ranks[number % len(router.ranks)]


WAYS: dict[str, Choose] = {"ours": ours, "hashing alone": hashing, "taking turns": taking_turns}


def replay(trace: Trace, ranks: int, choose: Choose, *, faults: bool = False) -> Outcome:
    router, out = SessionRouter([f"rank{i}" for i in range(ranks)]), Outcome()
    cached: dict[tuple[str, str], int] = {}  # tokens of a session that a rank has read
    held: dict[str, tuple[str, int]] = {}  # where each live session was last, and its tokens
    past: dict[str, int] = {}
    half = len(trace.turns) // 2
    for number, turn in enumerate(trace.turns):
        if faults and number == half:
            router.leave("rank0")
            cached = {key: n for key, n in cached.items() if key[0] != "rank0"}
            held = {s: (r, n) for s, (r, n) in held.items() if r != "rank0"}
        if faults and number == half + len(trace.turns) // 8:
            router.join("rank0")
        rank = choose(router, turn, number)
        found = cached.get((rank, turn.session), 0)
        out.found, out.ideal = out.found + found, out.ideal + past.get(turn.session, 0)
        out.read[rank] = out.read.get(rank, 0) + turn.prompt - found + turn.reply
        if turn.session in held and held[turn.session][0] != rank:
            out.moved += 1
        whole = turn.prompt + turn.reply
        cached[rank, turn.session] = past[turn.session] = whole
        held[turn.session] = (rank, whole)
        if turn.last:
            held.pop(turn.session)
            router.end(turn.session)
        _look(out, router, held, number)
    return out


def _look(
    out: Outcome, router: SessionRouter, held: dict[str, tuple[str, int]], number: int
) -> None:
    """Once all seats are taken, and while they are."""
    if number % EVERY or len(held) < 4 * len(router.ranks):
        return
    loads = dict.fromkeys(router.ranks, 0)
    for rank, tokens in held.values():
        loads[rank] = loads.get(rank, 0) + tokens
    out.loads.append(max(loads.values()) * len(loads) / sum(loads.values()))


def claims(ranks: int = 8, sessions: int = 2000) -> list[Claim]:
    found = []
    trace = Trace.made_up(sessions=sessions, concurrent=32 * ranks, seed=0)
    size = f"{ranks} ranks, {sessions} sessions, {len(trace.turns)} turns"
    for faults in (False, True):
        for name, choose in WAYS.items():
            out = replay(trace, ranks, choose, faults=faults)
            claimed = choose is ours
            what = f"routing, {name}{', a rank lost and back' if faults else ''} ({size})"
            work = max(out.read.values()) * len(out.read) / sum(out.read.values())
            found += [
                Claim(
                    name=f"{what}: share of findable prefix tokens found",
                    target=">= 95 %" if claimed else "",
                    measured=f"{100 * out.affinity:.1f} %, {out.moved} moves",
                    holds=out.affinity >= 0.95 if claimed else None,
                ),
                Claim(
                    name=f"{what}: fullest rank over mean (tokens held; tokens computed)",
                    target="<= 1.2" if claimed else "",
                    measured=f"{out.busiest:.2f}; {work:.2f}",
                    holds=max(out.busiest, work) <= 1.2 if claimed else None,
                ),
            ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--sessions", type=int, default=2000)
    args = parser.parse_args()
    print_claims(claims(args.ranks, args.sessions))


if __name__ == "__main__":
    main()
