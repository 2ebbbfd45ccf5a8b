"""Random clients, aborts, pauses, weight updates and preemption leave no leaks."""

import asyncio
import random
import threading

import pytest

from paddock.engine import InvalidRequestError, Request
from paddock.records import SamplingParams
from tests.engine.networks import copy_of, engine, generate_as_one_batch, greedy, network, prompts
from tests.model.networks import VOCAB, build_network, latent_config


def some_request(rng):
    shared = prompts(3, seed=1)[rng.randrange(3)]
    own = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20)))
    return Request(
        token_ids=(shared + own) if rng.random() < 0.7 else own,
        sampling_params=SamplingParams(
            max_new_tokens=rng.randrange(1, 30),
            temperature=rng.choice([0.0, 0.7, 1.0]),
            top_p=rng.choice([1.0, 0.8]),
            frequency_penalty=rng.choice([0.0, 0.5]),
            stop_token_ids=(rng.randrange(VOCAB),),
        ),
        priority=rng.randrange(3),
        cache_salt=rng.choice(["", "a"]),
        top_logprobs=rng.choice([0, 2]),
        prompt_logprobs_start=rng.choice([None, 0, 1]),
    )


async def client(serving, rng, count):
    for _ in range(count):
        request = some_request(rng)
        match rng.randrange(5):
            case 0:  # disconnects early
                leave = rng.randrange(4)
                async for delta in serving.stream(request):
                    if delta.output is not None or not (leave := leave - 1):
                        break
            case 1:  # is cancelled
                task = asyncio.create_task(serving.async_generate(request))
                await asyncio.sleep(rng.random() * 0.02)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            case 2:  # too long
                with pytest.raises(InvalidRequestError):
                    await serving.async_generate(Request(token_ids=(1,) * 200))
            case _:
                answer = await serving.async_generate(request)
                assert answer.completion.token_ids or answer.completion.finish == "abort"


async def disturb(serving, rng, done):
    """Weight updates, pauses and flushes until the clients are done."""
    old, other = (
        network("sparse").state_dict(),
        build_network(latent_config(), seed=11).state_dict(),
    )
    version = 0
    while not done.is_set():
        await asyncio.sleep(0.02)
        mode = rng.choice(["retract", "in_place", "abort"])
        match rng.randrange(3):
            case 0:
                version += 1
                weights = old if version % 2 == 0 else other
                await asyncio.to_thread(
                    serving.update_weights,
                    lambda net, w=weights: net.load_state_dict(w),
                    version,
                    mode,
                )
            case 1:
                await asyncio.to_thread(serving.pause, mode)
                await asyncio.to_thread(serving.resume)
            case 2:
                await asyncio.to_thread(serving.flush_cache)


@pytest.mark.parametrize(("steps", "ahead"), [(0, False), (3, False), (0, True)])
def test_no_request_page_or_thread_is_leaked(steps, ahead):
    rng = random.Random(steps)
    threads = threading.active_count()

    async def main(serving):
        done = asyncio.Event()
        disturbance = asyncio.create_task(disturb(serving, rng, done))
        await asyncio.gather(*(client(serving, random.Random(seed), 12) for seed in range(8)))
        done.set()
        await disturbance
        assert len(asyncio.all_tasks()) == 1

    serving = engine(
        copy_of(network("sparse")),
        num_speculative_tokens=steps,
        async_scheduling=ahead,
        num_pages=44,
        context_length=96,
        max_running_requests=6,
    )
    with serving:
        asyncio.run(main(serving))
        generate_as_one_batch(serving, [greedy(prompt, 25) for prompt in prompts(6, seed=1)])
        stats = serving.stats()
        assert serving.healthy
        assert serving.audit() == []
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.counters.failed == 0
        assert stats.counters.requests == stats.counters.finished + stats.counters.aborted
        assert stats.preemptions > 0
        assert serving.flush_cache()
        assert serving.stats().pages_used == 0
        assert not serving._ids
    assert threading.active_count() == threads
