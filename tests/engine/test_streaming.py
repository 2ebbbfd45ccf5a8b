"""Streaming: deltas arrive in order, complete and once while the next step runs."""

import asyncio
import time
from queue import SimpleQueue
from threading import Event, Thread

import pytest

from paddock.engine import EngineError
from tests.engine.networks import (
    assert_greedy,
    engine,
    greedy,
    network,
    paused_once_started,
    prompts,
)
from tests.patience import until, until_async

PROMPTS = prompts(6)
COUNT = 12


@pytest.fixture(params=[False, True], ids=["at once", "later"])
def serving(request):
    with engine(network("counting"), num_speculative_tokens=2) as found:
        found._loop.overlap_streaming = request.param
        yield found


async def deltas_of(serving, prompt):
    return [delta async for delta in serving.stream(greedy(prompt, COUNT))]


def test_deltas_add_up_to_the_reply(serving):
    async def main():
        return await asyncio.gather(*(deltas_of(serving, prompt) for prompt in PROMPTS))

    for prompt, deltas in zip(PROMPTS, asyncio.run(main()), strict=True):
        answer = deltas[-1].output
        assert [delta.output for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert sum((d.token_ids for d in deltas), ()) == answer.completion.token_ids
        assert sum((d.logprobs for d in deltas), ()) == answer.completion.logprobs
        assert len(deltas) > 3
        assert_greedy(network("counting"), prompt, answer.completion)
    assert serving.audit() == []


def test_a_pause_delivers_all_tokens(serving):
    async def main():
        first = asyncio.Event()
        tokens = []

        async def listen():
            async for delta in serving.stream(greedy(PROMPTS[0], 80)):
                tokens.extend(delta.token_ids)
                first.set()
            return delta.output

        with paused_once_started(serving):
            task = asyncio.create_task(listen())
            await first.wait()
            await asyncio.to_thread(serving.pause, "in_place")
            (sequence,) = serving._loop.requests.values()
            await until_async(lambda: len(tokens) == sequence.num_generated)
            assert sequence.num_generated < 80
        answer = await task
        assert tuple(tokens) == answer.completion.token_ids

    asyncio.run(main())
    assert serving.audit() == []


def test_an_abort_comes_after_the_delivered_tokens(serving):
    async def main():
        tokens = []
        async for delta in serving.stream(greedy(PROMPTS[0], 100, id="one")):
            tokens.extend(delta.token_ids)
            if delta.output is None:
                serving.abort("one")
        assert delta.output.completion.finish == "abort"
        assert tuple(tokens) == delta.output.completion.token_ids

    for _ in range(3):
        asyncio.run(main())
    assert serving.audit() == []


def test_a_busy_event_loop_is_woken_once_for_all_replies(serving, monkeypatch):
    async def main():
        loop, woken = asyncio.get_running_loop(), []
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(
            loop, "call_soon_threadsafe", lambda *args: woken.append(args) or wake(*args)
        )
        serving.pause("retract")
        tasks = [asyncio.create_task(serving.async_generate(greedy(p, COUNT))) for p in PROMPTS]
        await asyncio.sleep(0)  # all are submitted
        serving.resume()
        until(lambda: serving.stats().counters.finished == len(PROMPTS))  # the loop is busy
        assert len(woken) == 1
        return await asyncio.gather(*tasks)

    for prompt, answer in zip(PROMPTS, asyncio.run(main()), strict=True):
        assert_greedy(network("counting"), prompt, answer.completion)


def test_a_reused_id_gets_both_outputs():
    with engine(network("sparse")) as engine_:

        def requests():
            yield greedy((1,), 2, id="x")
            while engine_._ids:  # until the first is finished
                engine_.stats()
            yield greedy((1, 2), 3, id="x")

        lengths = [
            len(answer.completion.token_ids) for answer in engine_.generate_outputs(requests())
        ]
    assert lengths == [2, 3]


def test_closing_the_engine_fails_all_clients_despite_a_broken_one():
    closing, inbox, started, go = engine(network("sparse")), SimpleQueue(), Event(), Event()
    closing.run_between_steps(lambda network: started.set() or go.wait())
    started.wait()
    closed = Thread(target=closing.close)
    closed.start()
    while not closing._loop._inbox.qsize():  # the close is queued; later requests come after it
        time.sleep(0.001)
    closing.submit(greedy((1, 2), 4), lambda delta: {}["a failing callback"])
    closing.run_between_steps(lambda network: None).cancel()
    closing.submit(greedy((1, 2), 4), inbox.put)
    go.set()
    closed.join()
    assert isinstance(inbox.get(block=False), EngineError)


def test_leaving_a_stream_aborts_its_request():
    async def main(engine):
        with paused_once_started(engine):
            async for _ in engine.stream(greedy(PROMPTS[0], 80)):
                break
            await until_async(lambda: not engine.stats().running)
        return engine.stats()

    with engine(network("sparse")) as streaming:
        stats = asyncio.run(main(streaming))
        assert stats.counters.aborted == 1
        assert streaming.audit() == []


def test_an_aborted_request_keeps_its_tokens():
    seen, done = [], SimpleQueue()

    def deliver(delta):  # on the engine's thread, between two steps
        seen.extend(delta.token_ids)
        if len(seen) == 3:
            streaming.abort("long")
        if delta.output is not None:
            done.put(delta.output)

    with engine(network("sparse")) as streaming:
        streaming.submit(greedy(PROMPTS[0], 80, id="long"), deliver, streamed=True)
        answer = done.get()
    assert answer.completion.finish == "abort"
    assert answer.completion.token_ids == tuple(seen)
    assert 3 <= len(seen) < 80
    assert_greedy(network("sparse"), PROMPTS[0], answer.completion)
