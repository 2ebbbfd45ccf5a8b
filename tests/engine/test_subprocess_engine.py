"""An engine in a subprocess: same replies as in this process, and recovery from crashes."""

import asyncio
import os
import signal
from functools import partial
from multiprocessing import parent_process
from threading import Event, Thread

import pytest
import torch

from paddock.checkpoint import CheckpointError
from paddock.checkpoint.weight_sync import WeightUpdate
from paddock.engine import EngineError, InvalidRequestError, Request, SubprocessEngine
from paddock.engine.subprocess_engine import MAX_RESTARTS
from paddock.engine.subprocess_server import FlattenedTensorBucket
from paddock.records import SamplingParams
from tests.engine.networks import copy_of, engine, network
from tests.engine.networks import prompts as random_prompts
from tests.engine.test_weight_versions import other
from tests.engine.weight_updates import HEAD, tensors
from tests.patience import PATIENCE_S, until, until_async

PROMPTS = random_prompts(12, seed=8)


def sparse():
    torch.set_num_threads(1)
    return engine(copy_of(network("sparse")))


def only_once(marker):
    """An engine on the first call, an error afterwards."""
    if marker.exists():
        raise OSError("no memory left")
    marker.touch()
    return sparse()


def fail_in_child():
    assert parent_process() is not None
    raise ValueError("the folder has no weights")


@pytest.fixture(scope="module")
def subprocess_engine():
    with SubprocessEngine(sparse) as found:
        yield found
        assert found.audit() == []


@pytest.fixture
def killable_engine():
    with SubprocessEngine(sparse) as found:
        yield found


def sampled(prompt, seed, count=12):
    sampling = SamplingParams(max_new_tokens=count, seed=seed, ignore_eos=True)
    return Request(token_ids=prompt, sampling_params=sampling)


async def generate_all(found, requests):
    return await asyncio.gather(*map(found.async_generate, requests))


async def deltas(found, request):
    return [delta async for delta in found.stream(request)]


def expected_outputs(*, version):
    """The outputs of an engine in this process with the weights of that version."""
    with engine(copy_of(network("sparse") if version == 0 else other())) as local:
        local.update_weights(lambda _: None, version)
        return asyncio.run(generate_all(local, [sampled(p, i) for i, p in enumerate(PROMPTS)]))


def assert_same(answers, expected):
    for found, wanted in zip(answers, expected, strict=True):
        assert found.completion.token_ids == wanted.completion.token_ids
        assert found.completion.versions == wanted.completion.versions
        assert found.completion.logprobs == pytest.approx(wanted.completion.logprobs, abs=1e-6)
        assert found.prompt_tokens == wanted.prompt_tokens


def test_replies_match_an_engine_in_this_process(subprocess_engine):
    requests = [sampled(prompt, i) for i, prompt in enumerate(PROMPTS)]
    assert_same(asyncio.run(generate_all(subprocess_engine, requests)), expected_outputs(version=0))


def test_a_stream_is_delivered_incrementally(subprocess_engine):
    every = asyncio.run(deltas(subprocess_engine, sampled(PROMPTS[0], 0)))
    assert len(every) > 3
    done = every[-1].output.completion
    assert tuple(i for delta in every for i in delta.token_ids) == done.token_ids
    assert all(delta.output is None for delta in every[:-1])


def test_invalid_requests_are_rejected_with_the_numbers(subprocess_engine):
    with pytest.raises(InvalidRequestError, match="token id 100000 is not in"):
        asyncio.run(subprocess_engine.async_generate(sampled((1, 100000), 0)))
    assert asyncio.run(subprocess_engine.check_health())


def test_cancelled_and_disconnected_clients_leave_nothing_behind(subprocess_engine):
    async def leave():
        await asyncio.to_thread(subprocess_engine.pause, "in_place")  # or it may finish before
        pending = asyncio.create_task(
            subprocess_engine.async_generate(sampled(PROMPTS[0], 0, count=80))
        )
        await until_async(lambda: subprocess_engine.stats().waiting)
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
        await asyncio.to_thread(subprocess_engine.resume)
        async for _ in subprocess_engine.stream(sampled(PROMPTS[1], 0, count=80)):
            break

    asyncio.run(leave())
    until(lambda: not subprocess_engine.stats().running)
    assert subprocess_engine.stats().waiting == 0
    assert subprocess_engine.audit() == []


def test_a_cancelled_or_failing_client_does_not_block_others(subprocess_engine):
    async def main():
        beat = asyncio.create_task(subprocess_engine.check_health())
        await asyncio.sleep(0)
        beat.cancel()  # before the reply arrives
        await asyncio.gather(beat, return_exceptions=True)
        subprocess_engine.submit(
            sampled(PROMPTS[0], 0), lambda delta: {}["a failing callback"], streamed=True
        )
        async with asyncio.timeout(60):
            answer = await subprocess_engine.async_generate(sampled(PROMPTS[1], 1))
            return len(answer.completion.token_ids), await subprocess_engine.check_health()

    assert asyncio.run(main()) == (12, True)


def test_no_request_starts_while_paused(subprocess_engine):
    async def paused():
        await asyncio.to_thread(subprocess_engine.pause, "in_place")
        pending = asyncio.create_task(subprocess_engine.async_generate(sampled(PROMPTS[0], 0)))
        done, _ = await asyncio.wait([pending], timeout=0.3)
        assert not done
        await asyncio.to_thread(subprocess_engine.resume)
        return await pending

    assert len(asyncio.run(paused()).completion.token_ids) == 12


def test_new_weights_are_served_and_corrupt_ones_rejected(killable_engine):
    requests = [sampled(prompt, i) for i, prompt in enumerate(PROMPTS)]
    half = dict(list(tensors().items())[::2])
    with pytest.raises(CheckpointError, match="is missing"):
        killable_engine.update_weights([WeightUpdate(7, half)])
    broken = tensors() | {HEAD: tensors()[HEAD].detach().clone().fill_(float("nan"))}
    with pytest.raises(CheckpointError, match=HEAD):
        killable_engine.update_weights([WeightUpdate(7, broken)])
    assert killable_engine.stats().version == 0
    assert_same(asyncio.run(generate_all(killable_engine, requests)), expected_outputs(version=0))
    killable_engine.update_weights([WeightUpdate(7, tensors())], verify=True)
    assert killable_engine.stats().version == 7
    assert_same(asyncio.run(generate_all(killable_engine, requests)), expected_outputs(version=7))


def test_sent_weights_do_not_change_with_the_trainers_memory(killable_engine):
    """The trainer overwrites the memory of the weights it has sent."""
    live = {name: tensor.detach().clone() for name, tensor in tensors().items()}
    killable_engine.update_weights([WeightUpdate(7, live)])
    for tensor in live.values():
        tensor.fill_(float("nan"))
    requests = [sampled(prompt, i) for i, prompt in enumerate(PROMPTS)]
    assert_same(asyncio.run(generate_all(killable_engine, requests)), expected_outputs(version=7))


def test_a_flattened_bucket_keeps_the_weight_update():
    made = {"a": torch.arange(3.0), "b": torch.ones(2, 5, dtype=torch.bfloat16), "c": torch.ones(0)}
    found = FlattenedTensorBucket.from_update(WeightUpdate(3, made)).tensors()
    assert found.keys() == made.keys()
    for name, tensor in made.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


class SlowToPickle:
    def __init__(self):
        self.begun, self.go = Event(), Event()

    def __reduce__(self):
        self.begun.set()
        assert self.go.wait(PATIENCE_S)
        return (int, ())


def test_a_pipe_is_closed_only_when_nobody_writes_to_it(killable_engine):
    """A late message must not go to the pipe that gets the same file descriptor."""
    pipe, process, slow = killable_engine._pipe, killable_engine._process, SlowToPickle()
    killable_engine._outbox.put([slow])
    assert slow.begun.wait(PATIENCE_S)
    process.kill()
    process.join()
    ending = Thread(target=killable_engine._end_process)
    ending.start()
    ending.join(0.3)
    assert not pipe.closed
    slow.go.set()
    ending.join()
    assert pipe.closed


def test_a_killed_process_is_detected_at_once_and_restarted(killable_engine):
    """Its requests fail; the restarted process has the newest weights before it gets requests."""

    async def killed():
        await asyncio.to_thread(killable_engine.pause, "in_place")  # or some may finish before
        pending = [
            asyncio.create_task(killable_engine.async_generate(sampled(prompt, i, count=80)))
            for i, prompt in enumerate(PROMPTS)
        ]
        await until_async(lambda: killable_engine.stats().waiting == len(PROMPTS))
        os.kill(killable_engine.pid, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            return await asyncio.gather(*pending, return_exceptions=True)

    killable_engine.update_weights([WeightUpdate(7, tensors())])
    first = killable_engine.pid
    outcomes = asyncio.run(killed())
    assert all(isinstance(outcome, EngineError) for outcome in outcomes)
    assert "was killed by SIGKILL" in str(outcomes[0])
    assert not killable_engine.healthy
    assert not asyncio.run(killable_engine.check_health())
    killable_engine.update_weights([WeightUpdate(8, tensors())])  # kept for the restarted process
    killable_engine.restart_async()
    killable_engine._restart_thread.join()
    assert killable_engine.healthy and killable_engine.pid != first
    assert killable_engine.stats().version == 8
    answer = asyncio.run(killable_engine.async_generate(sampled(PROMPTS[0], 0)))
    assert [segment.version for segment in answer.completion.versions] == [8]


def test_a_process_that_cannot_start_reports_why():
    with pytest.raises(EngineError, match="ValueError: the folder has no weights"):
        SubprocessEngine(fail_in_child)


def test_an_engine_that_cannot_restart_gives_up(tmp_path):
    with SubprocessEngine(partial(only_once, tmp_path / "marker")) as found:
        os.kill(found.pid, signal.SIGKILL)
        until(lambda: not found.healthy)
        for _ in range(MAX_RESTARTS):
            assert not found.gave_up
            found.restart()
        assert found.gave_up
        with pytest.raises(RuntimeError, match=r"failed to start 3 times: OSError: no memory left"):
            asyncio.run(found.async_generate(sampled(PROMPTS[0], 0)))


def test_closing_ends_the_process():
    found = SubprocessEngine(sparse)
    process = found._process
    found.close()
    assert process.exitcode == 0
    with pytest.raises(EngineError, match="closed"):
        found.stats()
