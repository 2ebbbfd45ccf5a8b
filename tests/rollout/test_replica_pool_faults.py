"""Replica pool: deadlines, rejected requests, cancellation, real engines."""

import asyncio
from collections import Counter

import pytest

from paddock.engine import (
    ContextLengthExceededError,
    Engine,
    EngineError,
    EngineSettings,
    InvalidRequestError,
    Request,
)
from paddock.records import Completion, SamplingParams, Segment
from paddock.rollout.client import (
    EngineUnavailableError,
    InProcessClient,
    RequestRejectedError,
)
from paddock.rollout.continuation import can_continue, concat_completions, continuation_request
from paddock.rollout.replica_pool import Replica, ReplicaPool
from tests.model.networks import build_network, latent_config
from tests.rollout.test_replica_pool import (
    QUICK,
    FakeReplica,
    collect_stream,
    expected,
    make_request,
    replicas,
)


def test_a_request_waits_no_longer_than_its_deadline():
    async def run():
        down = FakeReplica("a")
        down.up = False
        brief = QUICK.model_copy(update={"request_timeout_s": 0.2})
        async with ReplicaPool(replicas(down), brief) as pool:
            with pytest.raises(EngineUnavailableError, match=r"attempts|no engine is alive"):
                await pool.generate(make_request())
            with pytest.raises(EngineUnavailableError):
                await collect_stream(pool, make_request())
        hanging = FakeReplica("b")
        hanging.hangs = True
        patient = brief.model_copy(update={"misses": 10**6})
        async with ReplicaPool(replicas(hanging), patient) as pool:
            with pytest.raises(EngineUnavailableError):
                await pool.generate(make_request())

    asyncio.run(run())


def test_a_live_replica_that_fails_loses_the_session():
    class Sulking(FakeReplica):
        async def stream(self, request):
            self.requests.append(request)
            raise EngineUnavailableError("503: overloaded")
            yield

    async def run():
        fakes = [Sulking("a"), Sulking("b"), Sulking("c")]
        async with ReplicaPool(replicas(*fakes), QUICK) as pool:
            first = pool.router.route("s")
            for i, fake in enumerate(fakes):
                if fake.name != first:
                    fakes[i].__class__ = FakeReplica
            answer = await pool.generate(make_request())
            assert answer.completion.token_ids == expected((1, 2, 3))
            assert len(next(f for f in fakes if f.name == first).requests) == 3
            assert len(pool.live_replicas) == 3

    asyncio.run(run())


def test_an_invalid_request_is_not_retried():
    class Refusing(FakeReplica):
        async def stream(self, request):
            self.requests.append(request)
            raise RequestRejectedError("too long")
            yield

    async def run():
        fake = Refusing("a")
        async with ReplicaPool(replicas(fake), QUICK) as pool:
            with pytest.raises(RequestRejectedError):
                await pool.generate(make_request())
            assert len(fake.requests) == 1

    asyncio.run(run())


def test_cancelling_a_request_aborts_it_at_the_replica():
    async def run():
        fake = FakeReplica("a")
        async with ReplicaPool(
            replicas(fake), QUICK.model_copy(update={"health_failure_threshold": 10**6})
        ) as pool:
            fake.hangs = True
            running = asyncio.create_task(pool.generate(make_request()))
            while not fake.open:
                await asyncio.sleep(0)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert fake.open == 0
            stream = pool.stream(make_request())
            fake.hangs = False
            await anext(stream)
            await stream.aclose()
            assert fake.open == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_new_tokens=20, stop=("x",)),
        SamplingParams(max_new_tokens=20, frequency_penalty=0.5),
        SamplingParams(max_new_tokens=20, thinking_budget=3),
    ],
)
def test_a_reply_that_cannot_be_continued_restarts_or_raises(sampling):
    assert not can_continue(sampling)

    async def run():
        fakes = [FakeReplica("a"), FakeReplica("b")]
        async with ReplicaPool(replicas(*fakes), QUICK) as pool:
            breaking = next(f for f in fakes if f.name == pool.router.route("s"))
            breaking.breaks_at, breaking.finish = 5, "abort"
            answer = await pool.generate(make_request(sampling=sampling))
            assert answer.completion.token_ids == expected((1, 2, 3))
            assert tuple(breaking.requests[1].token_ids) == (1, 2, 3)
            breaking.breaks_at = 5
            with pytest.raises(EngineUnavailableError, match="cannot be continued"):
                await collect_stream(pool, make_request(sampling=sampling))

    asyncio.run(run())


def test_parts_of_a_reply_are_joined():
    one = Completion(
        token_ids=(1, 2),
        logprobs=(-1.0, -2.0),
        versions=(Segment(1, 1), Segment(2, 1)),
        finish="abort",
        forced=(1,),
    )
    both = concat_completions(one, one)
    assert both.token_versions == (1, 2, 1, 2) and both.forced == (1, 3)
    assert (
        continuation_request(make_request(sampling=SamplingParams(max_new_tokens=2)), one) is None
    )


def test_sessions_keep_their_replica_and_hit_its_prefix_cache():
    """Three engines, sessions of several turns: every cacheable prefix is a hit."""

    async def run():
        network = build_network(latent_config())
        settings = EngineSettings(
            page_size=1, kv_cache_bytes=1 << 22, context_length=128, stop_token_ids=()
        )
        engines = [Engine(network, None, settings) for _ in range(3)]
        names, served = [f"e{i}" for i in range(3)], Counter()

        class RecordingClient(InProcessClient):
            async def generate(self, request):
                answer = await super().generate(request)
                served[request.session_id, id(self.engine)] += 1
                return answer

        def replica(name, engine):
            seam = RecordingClient(
                engine,
                Request,
                overlong_errors=(ContextLengthExceededError,),
                rejection_errors=(InvalidRequestError,),
                engine_errors=(EngineError,),
            )
            return Replica(name, seam, _well)

        async with ReplicaPool(map(replica, names, engines), QUICK) as pool:
            found, ideal = await asyncio.gather(*(run_session(pool, f"s{i}") for i in range(12))), 0
        ideal = sum(before for turns in found for _, before in turns)
        hits = sum(cached for turns in found for cached, _ in turns)
        assert hits >= 0.95 * ideal
        assert len(served) == 12, "each session was served by one engine"
        for each in engines:
            assert each.audit() == []
            each.close()

    async def run_session(pool, session):
        ids, turns, before = tuple(session.encode()[i % 2] % 50 for i in range(12)), [], 0
        ids = (int(session[1:]), *ids)
        for turn in range(4):
            sampling = SamplingParams(max_new_tokens=6, temperature=1.0, seed=turn)
            answer = await pool.generate(make_request(session, ids, sampling))
            turns.append((answer.cached_tokens, max(0, before - 1)))
            ids += (*answer.completion.token_ids, 7, 8)
            before = len(ids) - 2
        pool.end_session(session)
        return turns

    async def _well(_patience_s):
        return True

    asyncio.run(run())
