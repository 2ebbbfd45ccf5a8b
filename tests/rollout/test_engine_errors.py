"""Who is to blame when an engine takes no request: only what is too long is the policy's."""

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
from tests.engine.nets import engine, greedy, network
from tests.model.networks import born, latent_config
from tests.rollout.test_replica_pool import QUICK, SAMPLING, Fake, ask, replicas


def in_process(engine):
    return InProcessClient(
        engine,
        Request,
        overlong_errors=(ContextLengthExceededError,),
        rejection_errors=(InvalidRequestError,),
        engine_errors=(EngineError,),
    )


def test_a_full_engine_may_be_asked_again_and_what_is_too_long_may_not():
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


def test_a_replica_that_was_only_paused_is_asked_under_another_id():
    """Its thread stands still, so that the abort of the first request is not heard either."""
    settings = EngineSettings(kv_cache_bytes=1 << 22, context_length=128, stop_token_ids=())
    engine, stands, goes_on = Engine(born(latent_config()), None, settings), Event(), Event()

    def stand_still(_network):
        stands.set()
        goes_on.wait(60)

    well = True

    async def alive(_patience_s):
        return well

    async def run():
        nonlocal well
        async with ReplicaPool([Replica("a", in_process(engine), alive)], QUICK) as fleet:
            engine.run_between_steps(stand_still)
            await asyncio.to_thread(stands.wait, 60)
            question = replace(ask(ids=(1, 2, 3)), id="s/0")
            asking = asyncio.create_task(fleet.generate(question))
            async with asyncio.timeout(60):
                while not fleet.replicas["a"].pending:
                    await asyncio.sleep(0)
                well = False
                while fleet.live_replicas:
                    await asyncio.sleep(0.001)
                well = True
                while not fleet.live_replicas:
                    await asyncio.sleep(0.001)
                while not fleet.replicas["a"].pending and not asking.done():
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
def test_what_an_engine_does_not_take_now_is_asked_again(refused):
    """And if it never does, it is the engine's failure: nobody's request was wrong."""
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
        async with ReplicaPool([Replica("a", in_process(engine), well)], chosen) as fleet:
            asking = asyncio.create_task(fleet.generate(replace(ask(), id="x0")))
            if free:
                await asyncio.sleep(0)
                engine.resume()
            return await asking

    with Engine(born(latent_config()), None, settings) as engine:
        answer = asyncio.run(run(engine, 60.0, free=True))
        assert len(answer.completion.token_ids) == 20
    with (
        Engine(born(latent_config()), None, settings) as engine,
        pytest.raises(EngineUnavailableError),
    ):
        asyncio.run(run(engine, 0.1, free=False))


def test_when_no_replica_comes_back_the_run_ends_with_the_reason():
    async def run():
        down = Fake("a")
        down.up = False
        brief = QUICK.model_copy(update={"unreachable_timeout_s": 0.2, "request_timeout_s": 600.0})
        async with ReplicaPool(replicas(down), brief) as fleet:
            assert fleet.unavailable_reason() == ""
            with pytest.raises(RunAbortedError, match=r"no engine has answered for 0\.2 s: a: .*"):
                await fleet.generate(ask())
            assert fleet.unavailable_reason().startswith("a: ")

    asyncio.run(run())
