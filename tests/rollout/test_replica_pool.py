"""Replica pool: failover from the same token ids, health checks, admission and removal."""

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
    """The next token of the fake network."""
    return (31 * sum(ids) + 7 * len(ids)) % 1000


class FakeReplica(NonStreamingClient):
    """A deterministic network: the same ids get the same reply on every replica."""

    def __init__(self, name, *, breaks_at=None, finish="length", version=0):
        self.name, self.breaks_at, self.finish, self.version = name, breaks_at, finish, version
        self.up, self.requests, self.open = True, [], 0
        self.hangs = False

    async def generate(self, request):
        *_, last = [delta async for delta in self.stream(request)]
        return last.output

    async def stream(self, request):
        self.requests.append(request)
        self.open += 1
        try:
            ids, generated = list(request.token_ids), []
            for i in range(request.sampling_params.max_new_tokens):
                await asyncio.sleep(0)
                if self.breaks_at == i and self.finish == "lost":
                    self.up = False
                if not self.up:
                    raise EngineUnavailableError(f"{self.name} is down")
                while self.hangs:
                    await asyncio.sleep(1)
                if self.breaks_at == i and self.finish == "abort":
                    self.breaks_at = None
                    yield self._last((), generated, request, "abort")
                    return
                generated.append(next_token(ids))
                ids.append(generated[-1])
                if len(generated) < request.sampling_params.max_new_tokens:
                    yield OutputDelta(
                        token_ids=generated[-1:], logprobs=(-0.5,), version=self.version
                    )
            yield self._last(generated[-1:], generated, request, "length")
        finally:
            self.open -= 1

    def _last(self, new, generated, request, finish):
        done = Completion(
            token_ids=tuple(generated),
            logprobs=(-0.5,) * len(generated),
            versions=(Segment(self.version, len(generated)),) if generated else (),
            finish=finish,
        )
        answer = RequestOutput(completion=done, prompt_tokens=len(request.token_ids))
        return OutputDelta(
            token_ids=new, logprobs=(-0.5,) * len(new), version=self.version, output=answer
        )

    async def is_alive(self, _patience_s):
        return self.up and not self.hangs


def replicas(*fakes):
    return [Replica(fake.name, fake, fake.is_alive) for fake in fakes]


def make_request(session="s", ids=(1, 2, 3), sampling=SAMPLING):
    return InferenceRequest(token_ids=ids, sampling_params=sampling, session_id=session)


def expected(ids, count=20):
    found = list(ids)
    for _ in range(count):
        found.append(next_token(found))
    return tuple(found[len(ids) :])


async def collect_stream(pool, request):
    """The output of a stream, checked against its deltas."""
    ids, answer = [], None
    async for delta in pool.stream(request):
        assert answer is None, "no delta follows the output"
        ids += delta.token_ids
        answer = delta.output
    assert tuple(ids) == answer.completion.token_ids
    return answer


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("finish", ["lost", "abort"])
@pytest.mark.parametrize("at", [0, 1, 7, 19])
def test_an_interrupted_reply_is_completed_elsewhere(streamed, finish, at):
    async def run():
        fakes = [FakeReplica("a", version=3), FakeReplica("b", version=4)]
        async with ReplicaPool(replicas(*fakes), QUICK) as pool:
            first = pool.router.route("s")
            breaking = next(fake for fake in fakes if fake.name == first)
            breaking.breaks_at, breaking.finish = at, finish
            answer = await (
                collect_stream(pool, make_request()) if streamed else pool.generate(make_request())
            )
            done = answer.completion
            assert (done.token_ids, done.finish) == (expected((1, 2, 3)), "length")
            assert len(done.token_versions) == 20 and answer.prompt_tokens == 3
            if finish == "lost":
                assert pool.live_replicas != () and first not in pool.live_replicas
            kept = at if streamed or finish == "abort" else 0
            again = [a for fake in fakes for a in fake.requests][-1] if kept else None
            if again is not None and finish == "lost":
                other = next(fake for fake in fakes if fake.name != first)
                (rest,) = other.requests
                assert tuple(rest.token_ids) == (1, 2, 3, *expected((1, 2, 3), kept))
                assert rest.sampling_params.max_new_tokens == 20 - kept
                assert rest.sampling_params.seed != SAMPLING.seed
        assert all(fake.open == 0 for fake in fakes)

    asyncio.run(run())


def test_requests_of_a_hanging_replica_are_rerouted():
    async def run():
        fakes = [FakeReplica("a"), FakeReplica("b")]
        async with ReplicaPool(replicas(*fakes), QUICK) as pool:
            stuck = next(f for f in fakes if f.name == pool.router.route("s"))
            stuck.hangs = True
            answer = await pool.generate(make_request())
            assert answer.completion.token_ids == expected((1, 2, 3))
            assert pool.live_replicas == tuple(f.name for f in fakes if f is not stuck)
            stuck.hangs = False
            await until_async(lambda: len(pool.live_replicas) == 2)

    asyncio.run(run())


def test_a_busy_process_does_not_declare_its_replicas_dead():
    class Slow(FakeReplica):
        async def is_alive(self, patience_s):
            await asyncio.sleep(0.03)
            return self.up

    async def run():
        fake = Slow("a")
        async with ReplicaPool(replicas(fake), QUICK) as pool:
            for _ in range(8):
                await asyncio.sleep(0.01)
                time.sleep(0.2)
                assert pool.live_replicas == ("a",)
            fake.up = False
            await until_async(lambda: not pool.live_replicas)

    asyncio.run(run())


def test_by_default_a_dead_replica_is_deregistered_in_less_than_two_seconds():
    usual = ReplicaPoolSettings()
    assert (
        usual.health_failure_threshold
        * (usual.health_check_interval_s + usual.health_check_timeout_s + LOOP_LAG_PROBE_S)
        < 2.0
    )


def test_a_recovered_replica_is_admitted_only_with_current_weights():
    async def run():
        fake, admitted = FakeReplica("a"), []

        async def admit(name):
            admitted.append(name)
            return len(admitted) > 2

        async with ReplicaPool(replicas(fake), QUICK, admit=admit) as pool:
            fake.up = False
            await until_async(lambda: not pool.live_replicas)
            fake.up = True
            answer = await pool.generate(make_request())  # waits for a replica
            assert answer.completion.token_ids == expected((1, 2, 3))
            assert admitted == ["a"] * 3
            assert not await ReplicaPool([], QUICK, admit=_never).add(replicas(FakeReplica("c"))[0])

    async def _never(_name):
        return False

    asyncio.run(run())


def test_replicas_can_be_added_and_removed():
    async def run():
        one, two = FakeReplica("a"), FakeReplica("b")
        async with ReplicaPool(replicas(one), QUICK) as pool:
            assert await pool.add(replicas(two)[0])
            assert set(pool.live_replicas) == {"a", "b"}
            await pool.remove("a")
            for i in range(5):
                await pool.generate(make_request(f"s{i}"))
            assert len(two.requests) == 5 and one.requests == []

    asyncio.run(run())
