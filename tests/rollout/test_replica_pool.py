"""Replicas come and go; sessions go on, from the same ids, and nobody waits for ever."""

import asyncio
import time

import pytest

from paddock.records import Completion, SamplingParams, Segment
from paddock.rollout.client import (
    EngineUnavailableError,
    InferenceRequest,
    NonStreamingClient,
    OutputDelta,
    RequestOutput,
)
from paddock.rollout.replica_pool import LOOP_LAG_PROBE_S, Replica, ReplicaPool, ReplicaPoolSettings
from tests.patience import until_async

QUICK = ReplicaPoolSettings(
    health_check_interval_s=0.01,
    health_check_timeout_s=0.05,
    request_timeout_s=60.0,
    max_backoff_s=0.02,
)
SAMPLING = SamplingParams(max_new_tokens=20, seed=5)


def next_token(ids):
    """What the fake network says after these tokens."""
    return (31 * sum(ids) + 7 * len(ids)) % 1000


class Fake(NonStreamingClient):
    """A deterministic network: the same ids, the same reply, wherever it is asked."""

    def __init__(self, name, *, breaks_at=None, finish="length", version=0):
        self.name, self.breaks_at, self.finish, self.version = name, breaks_at, finish, version
        self.up, self.asks, self.open = True, [], 0
        self.hangs = False

    async def generate(self, ask):
        *_, last = [delta async for delta in self.stream(ask)]
        return last.output

    async def stream(self, ask):
        self.asks.append(ask)
        self.open += 1
        try:
            ids, said = list(ask.token_ids), []
            for i in range(ask.sampling_params.max_new_tokens):
                await asyncio.sleep(0)
                if self.breaks_at == i and self.finish == "lost":
                    self.up = False
                if not self.up:
                    raise EngineUnavailableError(f"{self.name} is down")
                while self.hangs:
                    await asyncio.sleep(1)
                if self.breaks_at == i and self.finish == "abort":
                    self.breaks_at = None
                    yield self._last((), said, ask, "abort")
                    return
                said.append(next_token(ids))
                ids.append(said[-1])
                if len(said) < ask.sampling_params.max_new_tokens:
                    yield OutputDelta(token_ids=said[-1:], logprobs=(-0.5,), version=self.version)
            yield self._last(said[-1:], said, ask, "length")
        finally:
            self.open -= 1

    def _last(self, new, said, ask, finish):
        done = Completion(
            token_ids=tuple(said),
            logprobs=(-0.5,) * len(said),
            versions=(Segment(self.version, len(said)),) if said else (),
            finish=finish,
        )
        answer = RequestOutput(completion=done, prompt_tokens=len(ask.token_ids))
        return OutputDelta(
            token_ids=new, logprobs=(-0.5,) * len(new), version=self.version, output=answer
        )

    async def alive(self, _patience_s):
        return self.up and not self.hangs


def replicas(*fakes):
    return [Replica(fake.name, fake, fake.alive) for fake in fakes]


def ask(session="s", ids=(1, 2, 3), sampling=SAMPLING):
    return InferenceRequest(token_ids=ids, sampling_params=sampling, session_id=session)


def expected(ids, count=20):
    found = list(ids)
    for _ in range(count):
        found.append(next_token(found))
    return tuple(found[len(ids) :])


async def gathered(fleet, question):
    """A stream's tokens as they came, and its answer."""
    ids, answer = [], None
    async for delta in fleet.stream(question):
        assert answer is None, "nothing follows the answer"
        ids += delta.token_ids
        answer = delta.output
    assert tuple(ids) == answer.completion.token_ids
    return answer


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("finish", ["lost", "abort"])
@pytest.mark.parametrize("at", [0, 1, 7, 19])
def test_a_reply_that_breaks_off_is_whole_in_the_end(streamed, finish, at):
    async def run():
        fakes = [Fake("a", version=3), Fake("b", version=4)]
        async with ReplicaPool(replicas(*fakes), QUICK) as fleet:
            first = fleet.router.route("s")
            breaking = next(fake for fake in fakes if fake.name == first)
            breaking.breaks_at, breaking.finish = at, finish
            answer = await (gathered(fleet, ask()) if streamed else fleet.generate(ask()))
            done = answer.completion
            assert (done.token_ids, done.finish) == (expected((1, 2, 3)), "length")
            assert len(done.token_versions) == 20 and answer.prompt_tokens == 3
            if finish == "lost":
                assert fleet.live_replicas != () and first not in fleet.live_replicas
            kept = at if streamed or finish == "abort" else 0
            again = [a for fake in fakes for a in fake.asks][-1] if kept else None
            if again is not None and finish == "lost":
                other = next(fake for fake in fakes if fake.name != first)
                (rest,) = other.asks
                assert tuple(rest.token_ids) == (1, 2, 3, *expected((1, 2, 3), kept))
                assert rest.sampling_params.max_new_tokens == 20 - kept
                assert rest.sampling_params.seed != SAMPLING.seed
        assert all(fake.open == 0 for fake in fakes)

    asyncio.run(run())


def test_a_replica_that_hangs_is_noticed_and_its_asks_go_elsewhere():
    async def run():
        fakes = [Fake("a"), Fake("b")]
        async with ReplicaPool(replicas(*fakes), QUICK) as fleet:
            stuck = next(f for f in fakes if f.name == fleet.router.route("s"))
            stuck.hangs = True
            answer = await fleet.generate(ask())
            assert answer.completion.token_ids == expected((1, 2, 3))
            assert fleet.live_replicas == tuple(f.name for f in fakes if f is not stuck)
            stuck.hangs = False
            await until_async(lambda: len(fleet.live_replicas) == 2)

    asyncio.run(run())


def test_a_busy_process_does_not_take_its_replicas_for_dead():
    class Slow(Fake):
        async def alive(self, patience_s):
            await asyncio.sleep(0.03)
            return self.up

    async def run():
        fake = Slow("a")
        async with ReplicaPool(replicas(fake), QUICK) as fleet:
            for _ in range(8):
                await asyncio.sleep(0.01)
                time.sleep(0.2)
                assert fleet.live_replicas == ("a",)
            fake.up = False
            await until_async(lambda: not fleet.live_replicas)

    asyncio.run(run())


def test_by_default_a_dead_replica_is_deregistered_in_less_than_two_seconds():
    usual = ReplicaPoolSettings()
    assert (
        usual.health_failure_threshold
        * (usual.health_check_interval_s + usual.health_check_timeout_s + LOOP_LAG_PROBE_S)
        < 2.0
    )


def test_who_comes_back_must_be_up_to_date_first():
    async def run():
        fake, admitted = Fake("a"), []

        async def admit(name):
            admitted.append(name)
            return len(admitted) > 2

        async with ReplicaPool(replicas(fake), QUICK, admit=admit) as fleet:
            fake.up = False
            await until_async(lambda: not fleet.live_replicas)
            fake.up = True
            answer = await fleet.generate(ask())  # waits until somebody is there
            assert answer.completion.token_ids == expected((1, 2, 3))
            assert admitted == ["a"] * 3
            assert not await ReplicaPool([], QUICK, admit=_never).add(replicas(Fake("c"))[0])

    async def _never(_name):
        return False

    asyncio.run(run())


def test_new_replicas_and_removed_ones():
    async def run():
        one, two = Fake("a"), Fake("b")
        async with ReplicaPool(replicas(one), QUICK) as fleet:
            assert await fleet.add(replicas(two)[0])
            assert set(fleet.live_replicas) == {"a", "b"}
            await fleet.remove("a")
            for i in range(5):
                await fleet.generate(ask(f"s{i}"))
            assert len(two.asks) == 5 and one.asks == []

    asyncio.run(run())
