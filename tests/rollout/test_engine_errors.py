"""Rejected requests: only exceeding the context length is a policy failure, the rest is retried."""

import asyncio
from dataclasses import replace
from threading import Event

import pytest

from paddock.engine import (
    ContextLengthExceededError,
    DuplicateRequestIdError,
    Engine,
    EngineError,
    EngineQueueFullError,
    EngineSettings,
    InvalidRequestError,
    Request,
)
from paddock.rollout.client import EngineUnavailableError, InProcessClient
from paddock.rollout.replica_pool import Replica, ReplicaPool
from paddock.rollout.task_health import RunAbortedError
from tests.engine.networks import engine, greedy, network
from tests.model.networks import build_network, latent_config
from tests.rollout.test_replica_pool import QUICK, SAMPLING, FakeReplica, make_request, replicas


def in_process(engine):
    return InProcessClient(
        engine,
        Request,
        overlong_errors=(ContextLengthExceededError,),
        rejection_errors=(InvalidRequestError,),
        engine_errors=(EngineError,),
    )


def test_a_full_engine_is_retried_and_a_too_long_prompt_is_not():
    with engine(network("sparse"), max_running_requests=1, max_queued_requests=1) as full:
        full.pause("in_place")
        for _ in range(2):
            full.submit(greedy((1,), 2), lambda delta: None)
        with pytest.raises(EngineQueueFullError, match="2 requests are queued or running"):
            full.submit(greedy((1,), 2), lambda delta: None)
        with pytest.raises(ContextLengthExceededError, match="exceeds this model's context"):
            full.submit(greedy((1,), 10**6), lambda delta: None)
    assert issubclass(EngineQueueFullError, EngineError) and issubclass(
        DuplicateRequestIdError, EngineError
    )
    assert not issubclass(EngineError, InvalidRequestError)


def test_a_paused_replica_is_retried_under_another_request_id():
    """Its thread is blocked, so the abort of the first request is not processed either."""
    settings = EngineSettings(kv_cache_bytes=1 << 22, context_length=128, stop_token_ids=())
    engine, stands, goes_on = (
        Engine(build_network(latent_config()), None, settings),
        Event(),
        Event(),
    )

    def stand_still(_network):
        stands.set()
        goes_on.wait(60)

    well = True

    async def is_alive(_patience_s):
        return well

    async def run():
        nonlocal well
        async with ReplicaPool([Replica("a", in_process(engine), is_alive)], QUICK) as pool:
            engine.run_between_steps(stand_still)
            await asyncio.to_thread(stands.wait, 60)
            request = replace(make_request(ids=(1, 2, 3)), id="s/0")
            asking = asyncio.create_task(pool.generate(request))
            async with asyncio.timeout(60):
                while not pool.replicas["a"].pending:
                    await asyncio.sleep(0)
                well = False
                while pool.live_replicas:
                    await asyncio.sleep(0.001)
                well = True
                while not pool.live_replicas:
                    await asyncio.sleep(0.001)
                while not pool.replicas["a"].pending and not asking.done():
                    await asyncio.sleep(0.001)
                goes_on.set()
                return await asking

    with engine:
        try:
            answer = asyncio.run(run())
        finally:
            goes_on.set()
    assert len(answer.completion.token_ids) == 20


@pytest.mark.parametrize("refused", ["full", "id"])
def test_a_temporarily_rejected_request_is_retried(refused):
    """If it is never accepted, that is an engine failure, not an invalid request."""
    settings = EngineSettings(
        kv_cache_bytes=1 << 22,
        context_length=128,
        stop_token_ids=(),
        max_running_requests=1,
        max_queued_requests=1,
    )

    async def well(_patience_s):
        return True

    async def run(engine, deadline_s, *, free):
        engine.pause("in_place")
        for i in range(2 if refused == "full" else 1):
            engine.submit(
                Request(token_ids=(1,), sampling_params=SAMPLING, id=f"x{i}"), lambda _: None
            )
        chosen = QUICK.model_copy(update={"request_timeout_s": deadline_s})
        async with ReplicaPool([Replica("a", in_process(engine), well)], chosen) as pool:
            asking = asyncio.create_task(pool.generate(replace(make_request(), id="x0")))
            if free:
                await asyncio.sleep(0)
                engine.resume()
            return await asking

    with Engine(build_network(latent_config()), None, settings) as engine:
        answer = asyncio.run(run(engine, 60.0, free=True))
        assert len(answer.completion.token_ids) == 20
    with (
        Engine(build_network(latent_config()), None, settings) as engine,
        pytest.raises(EngineUnavailableError),
    ):
        asyncio.run(run(engine, 0.1, free=False))


def test_the_run_ends_with_the_reason_when_no_replica_recovers():
    async def run():
        down = FakeReplica("a")
        down.up = False
        brief = QUICK.model_copy(update={"unreachable_timeout_s": 0.2, "request_timeout_s": 600.0})
        async with ReplicaPool(replicas(down), brief) as pool:
            assert pool.unavailable_reason() == ""
            with pytest.raises(RunAbortedError, match=r"no engine has answered for 0\.2 s: a: .*"):
                await pool.generate(make_request())
            assert pool.unavailable_reason().startswith("a: ")

    asyncio.run(run())
