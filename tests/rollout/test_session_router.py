"""Session router: affinity, load balancing, agreement of routers."""

from collections import Counter
from random import Random

import pytest

from benchmarks.rl_routing import Trace, ours, replay, round_robin
from paddock.http import ranks_by_preference
from paddock.rollout.session_router import NoRankAvailableError, SessionRouter

RANKS = tuple("abcdefgh")


def placed(router, sessions, tokens=1.0):
    return {session: router.route(session, tokens) for session in sessions}


def names(count):
    return [f"task-{i}" for i in range(count)]


def test_a_session_keeps_its_rank_while_the_rank_is_alive():
    router, rng = SessionRouter(RANKS), Random(0)
    first = placed(router, names(400))
    for _ in range(3000):
        session = rng.choice(names(400))
        assert router.route(session, rng.randint(1, 3)) == first[session]


@pytest.mark.parametrize("count", [4, 8, 16])
def test_adding_or_removing_a_rank_moves_only_its_share_of_sessions(count):
    ranks = [f"rank{i}" for i in range(count)]
    weights = dict.fromkeys(ranks, 1.0)
    before = {s: ranks_by_preference(s, weights)[0] for s in names(4000)}
    after = {s: ranks_by_preference(s, weights | {"new": 1.0})[0] for s in names(4000)}
    moved = [s for s in before if before[s] != after[s]]
    assert {after[s] for s in moved} == {"new"}
    assert len(moved) / 4000 <= 1 / count + 0.05

    router = SessionRouter(ranks)
    first = placed(router, names(4000))
    lost = set(router.leave(ranks[0]))
    assert lost == {s for s, rank in first.items() if rank == ranks[0]}
    assert len(lost) / 4000 <= 1 / count + 0.05
    second = placed(router, names(4000))
    assert {s for s in first if first[s] != second[s]} == lost


def test_ids_with_a_shared_prefix_are_spread():
    router = SessionRouter(RANKS)
    for stem in ("group-7-attempt-", "a", "\u00e9" * 50):
        found = Counter(ranks_by_preference(f"{stem}{i}", router.weights)[0] for i in range(2000))
        assert max(found.values()) / (2000 / len(RANKS)) < 1.25 and len(found) == len(RANKS)


def test_new_sessions_avoid_a_full_rank():
    router = SessionRouter(RANKS)
    placed(router, names(200))
    mean = sum(router.loads.values()) / len(RANKS)
    assert max(router.loads.values()) <= 1.12 * mean
    plain = Counter(ranks_by_preference(s, router.weights)[0] for s in names(200))
    assert max(plain.values()) > 1.12 * mean, "hashing alone would not have done it"


def test_rebalancing_moves_sessions_off_an_overloaded_rank():
    router = SessionRouter(RANKS)
    first = placed(router, names(400), 10)
    for session, rank in first.items():
        router.update_load(session, 30 if rank == "a" else 10)
    moved = [s for _ in range(20) for s in router.rebalance()]
    mean = sum(router.loads.values()) / len(RANKS)
    assert max(router.loads.values()) <= 1.2 * mean
    assert router.weights["a"] < min(w for r, w in router.weights.items() if r != "a")
    assert {first[s] for s in moved} == {"a"}
    assert len(moved) < 60, "only what must move"
    again = placed(router, names(400), 10)
    assert {s for s in first if first[s] != again[s]} == set(moved)


def test_sessions_with_running_requests_are_not_moved():
    router = SessionRouter("ab")
    first = placed(router, names(100))
    busy = [s for s, rank in first.items() if rank == "a"]
    for session in busy:
        router.update_load(session, 5.0)
    assert router.rebalance(busy=busy) == ()


def test_two_routers_agree():
    one, other = SessionRouter(RANKS), SessionRouter(reversed(RANKS))
    for session in names(500):
        assert ranks_by_preference(session, one.weights) == ranks_by_preference(
            session, other.weights
        )
    placed(one, names(300))
    for session in names(150):
        one.update_load(session, 40)
    one.rebalance()
    one.leave("c")
    other.merge_state(one.state())
    assert placed(one, names(300)) == placed(other, names(300))
    assert other.ranks == one.ranks or set(other.ranks) == set(one.ranks)
    later = [f"later-{i}" for i in range(500)]
    assert [ranks_by_preference(s, one.weights) for s in later] == [
        ranks_by_preference(s, other.weights) for s in later
    ]


def test_loads_stay_exact_under_random_operations():
    router, rng, held = SessionRouter("abcd"), Random(3), {}
    for step in range(3000):
        session = f"s{rng.randrange(60)}"
        match rng.randrange(5):
            case 0:
                router.end(session)
                held.pop(session, None)
            case 1 if step % 50 == 0 and len(router.ranks) > 2:
                for gone in router.leave(rng.choice(router.ranks)):
                    held.pop(gone, None)
            case 2 if step % 40 == 0:
                router.join(rng.choice("abcd"))
            case 3:
                router.rebalance()
            case _:
                held[session] = rng.randint(1, 100)
                router.route(session, held[session])
        loads = Counter()
        for name, tokens in held.items():
            loads[router.assignments[name]] += tokens
        assert {rank: pytest.approx(loads[rank]) for rank in router.ranks} == dict(router.loads)


def test_routing_without_ranks_raises():
    router = SessionRouter("a")
    router.leave("a")
    with pytest.raises(NoRankAvailableError, match="no rank"):
        router.route("s")


def test_a_replayed_trace_hits_its_prefixes_and_balances_ranks():
    trace = Trace.synthetic(sessions=400, concurrent=96, seed=1)
    found = replay(trace, 8, ours)
    assert found.affinity >= 0.95
    assert found.busiest <= 1.2
    plain = replay(trace, 8, round_robin)
    assert plain.affinity < 0.8
