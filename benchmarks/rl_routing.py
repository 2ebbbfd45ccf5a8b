"""Session routing on a replayed trace: prefix-cache hits and load balance over data-parallel ranks.

    python -m benchmarks.rl_routing [--ranks 8] [--sessions 2000]

The trace is synthetic: agent sessions with heavy-tailed numbers of turns and tokens per turn, a
fixed number of them concurrent; a new one begins when one ends. No engine runs. The prefix cache of
a rank is unbounded, so that routing alone is measured: prompt tokens of a turn that are cached on
its rank, as a share of those that one global cache would have. Baselines in the same run:
rendezvous hashing without load limits or rebalancing, and round-robin. Halfway through one rank is
lost; it rejoins later.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Self

from benchmarks.table import Claim, print_claims
from paddock.rollout.session_router import SessionRouter, ranks_by_preference

EVERY = 40  # turns between two measurements of the balance


@dataclass(frozen=True)
class Turn:
    session: str
    prompt: int  # tokens, with all earlier turns
    reply: int
    last: bool


@dataclass(frozen=True)
class Trace:
    turns: list[Turn]

    @classmethod
    def synthetic(cls, *, sessions: int, concurrent: int, seed: int) -> Self:
        rng, turns = Random(seed), []
        waiting = [cls._session(rng, i) for i in range(sessions)]
        running = [waiting.pop() for _ in range(min(concurrent, len(waiting)))]
        while running:
            at = rng.randrange(len(running))
            turns.append(running[at].pop(0))
            if not running[at]:
                running.pop(at)
                running += [waiting.pop()] if waiting else []
        return cls(turns)

    @staticmethod
    def _session(rng: Random, number: int) -> list[Turn]:
        count = min(200, max(1, round(rng.lognormvariate(2.5, 0.7))))
        found, tokens = [], 600  # a system prompt and tools
        for turn in range(count):
            prompt = tokens + round(rng.lognormvariate(5.5, 0.8))
            reply = round(rng.lognormvariate(5.5, 0.8))
            found.append(Turn(f"sums-{number}", prompt, reply, turn == count - 1))
            tokens = prompt + reply
        return found


@dataclass
class Outcome:
    found: int = 0  # cached prompt tokens
    ideal: int = 0  # with one global cache
    read: dict[str, int] = field(default_factory=dict)  # tokens computed by each rank
    loads: list[float] = field(default_factory=list)  # max over mean load, per measurement
    moved: int = 0

    @property
    def affinity(self) -> float:
        return self.found / max(1, self.ideal)

    @property
    def busiest(self) -> float:
        """Mean over the run of the max rank load over the mean rank load."""
        return sum(self.loads) / max(1, len(self.loads))


Choose = Callable[[SessionRouter, Turn, int], str]


def ours(router: SessionRouter, turn: Turn, number: int) -> str:
    if number % EVERY == 0:
        router.rebalance()
    return router.route(turn.session, turn.prompt + turn.reply)


def hashing(router: SessionRouter, turn: Turn, _number: int) -> str:
    return ranks_by_preference(turn.session, dict.fromkeys(router.ranks, 1.0))[0]


def round_robin(router: SessionRouter, _turn: Turn, number: int) -> str:
    return router.ranks[number % len(router.ranks)]


POLICIES: dict[str, Choose] = {"ours": ours, "hashing only": hashing, "round-robin": round_robin}


def replay(trace: Trace, ranks: int, choose: Choose, *, faults: bool = False) -> Outcome:
    router, out = SessionRouter([f"rank{i}" for i in range(ranks)]), Outcome()
    cached: dict[tuple[str, str], int] = {}  # tokens of a session in a rank's cache
    held: dict[str, tuple[str, int]] = {}  # rank and tokens of each live session
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
        _measure_load(out, router, held, number)
    return out


def _measure_load(
    out: Outcome, router: SessionRouter, held: dict[str, tuple[str, int]], number: int
) -> None:
    """Only while enough sessions are live."""
    if number % EVERY or len(held) < 4 * len(router.ranks):
        return
    loads = dict.fromkeys(router.ranks, 0)
    for rank, tokens in held.values():
        loads[rank] = loads.get(rank, 0) + tokens
    out.loads.append(max(loads.values()) * len(loads) / sum(loads.values()))


def claims(ranks: int = 8, sessions: int = 2000) -> list[Claim]:
    found = []
    trace = Trace.synthetic(sessions=sessions, concurrent=32 * ranks, seed=0)
    size = f"{ranks} ranks, {sessions} sessions, {len(trace.turns)} turns"
    for faults in (False, True):
        for name, choose in POLICIES.items():
            out = replay(trace, ranks, choose, faults=faults)
            has_target = choose is ours
            what = f"routing, {name}{', a rank lost and rejoined' if faults else ''} ({size})"
            work = max(out.read.values()) * len(out.read) / sum(out.read.values())
            found += [
                Claim(
                    name=f"{what}: prefix-cache hits of the ideal",
                    target=">= 95 %" if has_target else "",
                    measured=f"{100 * out.affinity:.1f} %, {out.moved} moves",
                    holds=out.affinity >= 0.95 if has_target else None,
                ),
                Claim(
                    name=f"{what}: max rank over mean (tokens held; tokens computed)",
                    target="<= 1.2" if has_target else "",
                    measured=f"{out.busiest:.2f}; {work:.2f}",
                    holds=max(out.busiest, work) <= 1.2 if has_target else None,
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
