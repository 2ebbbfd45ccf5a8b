"""An engine in a process of its own says what one in this process says, and may die."""

import asyncio
import os
import signal
from functools import partial
from multiprocessing import parent_process

import pytest
import torch

from paddock.checkpoint import CheckpointError
from paddock.checkpoint.weight_sync import WeightUpdate
from paddock.engine import EngineError, InvalidRequestError, Request, SubprocessEngine
from paddock.engine.subprocess_engine import MAX_RESTARTS
from paddock.engine.subprocess_server import FlattenedTensorBucket
from paddock.records import SamplingParams
from tests.engine.networks import copy_of, engine, network
from tests.engine.networks import prompts as drawn
from tests.engine.test_weight_versions import other
from tests.engine.weight_updates import HEAD, tensors
from tests.patience import PATIENCE_S, until, until_async

PROMPTS = drawn(12, seed=8)


def sparse():
    torch.set_num_threads(1)
    return engine(copy_of(network("sparse")))


def only_once(marker):
    """An engine, the first time."""
    if marker.exists():
        raise OSError("no memory left")
    marker.touch()
    return sparse()


def in_the_child():
    assert parent_process() is not None
    raise ValueError("the folder has no weights")


@pytest.fixture(scope="module")
def apart():
    with SubprocessEngine(sparse) as found:
        yield found
        assert found.audit() == []


@pytest.fixture
def mortal():
    with SubprocessEngine(sparse) as found:
        yield found


def sampled(prompt, seed, count=12):
    sampling = SamplingParams(max_new_tokens=count, seed=seed, ignore_eos=True)
    return Request(token_ids=prompt, sampling_params=sampling)


async def everything(found, requests):
    return await asyncio.gather(*map(found.async_generate, requests))


async def deltas(found, request):
    return [delta async for delta in found.stream(request)]


def asked(*, version):
    """The replies of an engine in this process that serves the weights of that version."""
    with engine(copy_of(network("sparse") if version == 0 else other())) as here:
        here.update_weights(lambda _: None, version)
        return asyncio.run(everything(here, [sampled(p, i) for i, p in enumerate(PROMPTS)]))


def assert_same(answers, expected):
    for found, wanted in zip(answers, expected, strict=True):
        assert found.completion.token_ids == wanted.completion.token_ids
        assert found.completion.versions == wanted.completion.versions
        assert found.completion.logprobs == pytest.approx(wanted.completion.logprobs, abs=1e-6)
        assert found.prompt_tokens == wanted.prompt_tokens


def test_it_says_what_an_engine_here_says(apart):
    requests = [sampled(prompt, i) for i, prompt in enumerate(PROMPTS)]
    assert_same(asyncio.run(everything(apart, requests)), asked(version=0))


def test_a_stream_comes_piece_by_piece(apart):
    every = asyncio.run(deltas(apart, sampled(PROMPTS[0], 0)))
    assert len(every) > 3
    done = every[-1].output.completion
    assert tuple(i for delta in every for i in delta.token_ids) == done.token_ids
    assert all(delta.output is None for delta in every[:-1])


def test_what_no_engine_could_answer_is_refused_with_the_numbers(apart):
    with pytest.raises(InvalidRequestError, match="token id 100000 is not in"):
        asyncio.run(apart.async_generate(sampled((1, 100000), 0)))
    assert asyncio.run(apart.check_health())


def test_whoever_goes_away_leaves_nothing_behind(apart):
    async def leave():
        await asyncio.to_thread(apart.pause, "in_place")  # or it may be answered before
        asking = asyncio.create_task(apart.async_generate(sampled(PROMPTS[0], 0, count=80)))
        await until_async(lambda: apart.stats().waiting)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asyncio.to_thread(apart.resume)
        async for _ in apart.stream(sampled(PROMPTS[1], 0, count=80)):
            break

    asyncio.run(leave())
    until(lambda: not apart.stats().running)
    assert apart.stats().waiting == 0
    assert apart.audit() == []


def test_whoever_loses_patience_or_fails_does_not_make_it_deaf(apart):
    async def main():
        beat = asyncio.create_task(apart.check_health())
        await asyncio.sleep(0)
        beat.cancel()  # before the answer is there
        await asyncio.gather(beat, return_exceptions=True)
        apart.submit(sampled(PROMPTS[0], 0), lambda delta: {}["nobody takes it"], streamed=True)
        async with asyncio.timeout(60):
            answer = await apart.async_generate(sampled(PROMPTS[1], 1))
            return len(answer.completion.token_ids), await apart.check_health()

    assert asyncio.run(main()) == (12, True)


def test_while_paused_it_begins_nothing(apart):
    async def paused():
        await asyncio.to_thread(apart.pause, "in_place")
        asking = asyncio.create_task(apart.async_generate(sampled(PROMPTS[0], 0)))
        done, _ = await asyncio.wait([asking], timeout=0.3)
        assert not done
        await asyncio.to_thread(apart.resume)
        return await asking

    assert len(asyncio.run(paused()).completion.token_ids) == 12


def test_new_weights_serve_and_damaged_ones_do_not(mortal):
    requests = [sampled(prompt, i) for i, prompt in enumerate(PROMPTS)]
    half = dict(list(tensors().items())[::2])
    with pytest.raises(CheckpointError, match="is missing"):
        mortal.update_weights([WeightUpdate(7, half)])
    broken = tensors() | {HEAD: tensors()[HEAD].detach().clone().fill_(float("nan"))}
    with pytest.raises(CheckpointError, match=HEAD):
        mortal.update_weights([WeightUpdate(7, broken)])
    assert mortal.stats().version == 0
    assert_same(asyncio.run(everything(mortal, requests)), asked(version=0))
    mortal.update_weights([WeightUpdate(7, tensors())], verify=True)
    assert mortal.stats().version == 7
    assert_same(asyncio.run(everything(mortal, requests)), asked(version=7))


def test_what_was_sent_does_not_change_with_the_trainer(mortal):
    """The trainer goes on writing where it wrote what it handed over."""
    live = {name: tensor.detach().clone() for name, tensor in tensors().items()}
    mortal.update_weights([WeightUpdate(7, live)])
    for tensor in live.values():
        tensor.fill_(float("nan"))
    requests = [sampled(prompt, i) for i, prompt in enumerate(PROMPTS)]
    assert_same(asyncio.run(everything(mortal, requests)), asked(version=7))


def test_a_bundle_holds_what_the_parcel_held():
    made = {"a": torch.arange(3.0), "b": torch.ones(2, 5, dtype=torch.bfloat16), "c": torch.ones(0)}
    found = FlattenedTensorBucket.from_update(WeightUpdate(3, made)).tensors()
    assert found.keys() == made.keys()
    for name, tensor in made.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_killed_process_is_noticed_at_once_and_followed_by_another(mortal):
    """What it was asked fails, the next one has the newest weights before it is asked."""

    async def killed():
        await asyncio.to_thread(mortal.pause, "in_place")  # or some may be answered before
        asking = [
            asyncio.create_task(mortal.async_generate(sampled(prompt, i, count=80)))
            for i, prompt in enumerate(PROMPTS)
        ]
        await until_async(lambda: mortal.stats().waiting == len(PROMPTS))
        os.kill(mortal.pid, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            return await asyncio.gather(*asking, return_exceptions=True)

    mortal.update_weights([WeightUpdate(7, tensors())])
    first = mortal.pid
    outcomes = asyncio.run(killed())
    assert all(isinstance(outcome, EngineError) for outcome in outcomes)
    assert "was killed by SIGKILL" in str(outcomes[0])
    assert not mortal.healthy
    assert not asyncio.run(mortal.check_health())
    mortal.update_weights([WeightUpdate(8, tensors())])  # kept for whoever follows
    mortal.restart_async()
    mortal._restart_thread.join()
    assert mortal.healthy and mortal.pid != first
    assert mortal.stats().version == 8
    answer = asyncio.run(mortal.async_generate(sampled(PROMPTS[0], 0)))
    assert [segment.version for segment in answer.completion.versions] == [8]


def test_a_process_that_cannot_begin_says_why():
    with pytest.raises(EngineError, match="ValueError: the folder has no weights"):
        SubprocessEngine(in_the_child)


def test_one_that_cannot_be_followed_is_given_up(tmp_path):
    with SubprocessEngine(partial(only_once, tmp_path / "marker")) as found:
        os.kill(found.pid, signal.SIGKILL)
        until(lambda: not found.healthy)
        for _ in range(MAX_RESTARTS):
            assert not found.gave_up
            found.restart()
        assert found.gave_up
        with pytest.raises(RuntimeError, match=r"failed to start 3 times: OSError: no memory left"):
            asyncio.run(found.async_generate(sampled(PROMPTS[0], 0)))


def test_it_ends_with_its_owner():
    found = SubprocessEngine(sparse)
    process = found._process
    found.close()
    assert process.exitcode == 0
    with pytest.raises(EngineError, match="closed"):
        found.stats()
