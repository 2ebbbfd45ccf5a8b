"""Weight updates while requests run: every token is attributed to the version that sampled it, and
KV entries of one version never serve another."""

import asyncio
from functools import cache
from queue import SimpleQueue

import pytest
import torch

from paddock.engine import Request
from paddock.records import SamplingParams
from tests.engine.networks import (
    assert_greedy,
    copy_of,
    engine,
    greedy,
    network,
    paused_once_started,
    prompts,
)
from tests.model.networks import build_network, latent_config, tokens

PROMPTS = prompts(6, seed=8)


@cache
def other():
    return build_network(latent_config(), seed=11)


def load_other(net):
    net.load_state_dict(other().state_dict())


def swapped(mode, *, steps=0, prompts=PROMPTS, count=60, ahead=False):
    """An engine whose weights were updated after every stream had started, and the outputs."""

    async def main(serving):
        started = [asyncio.Event() for _ in prompts]

        async def reply(i):
            async for delta in serving.stream(greedy(prompts[i], count)):
                started[i].set()
                if delta.output is not None:
                    return delta.output

        with paused_once_started(serving, len(prompts)):
            tasks = [asyncio.create_task(reply(i)) for i in range(len(prompts))]
            for event in started:
                await event.wait()
            await asyncio.to_thread(serving.update_weights, load_other, 1, mode)
        return await asyncio.gather(*tasks)

    settings = {"num_speculative_tokens": steps, "async_scheduling": ahead}
    serving = engine(copy_of(network("sparse")), **settings)
    return serving, asyncio.run(main(serving))


def logprobs_of(net, prompt, reply):
    with torch.no_grad():
        logp = net.logits(prompt + reply)[len(prompt) - 1 : -1].log_softmax(-1)
    return logp.gather(1, torch.tensor(reply).unsqueeze(1)).squeeze(1)


def assert_split(prompt, completion, *, exact_after):
    """Tokens of version 0 have the log-probabilities of the old network; those of version 1, if all
    KV entries were recomputed, those of the new one."""
    versions = [segment.version for segment in completion.versions]
    assert versions in ([0], [0, 1])
    before = completion.versions[0].tokens
    got = torch.tensor(completion.logprobs)
    old = logprobs_of(network("sparse"), prompt, completion.token_ids)
    new = logprobs_of(other(), prompt, completion.token_ids)
    torch.testing.assert_close(got[:before], old[:before], atol=1e-5, rtol=0)
    if exact_after:
        torch.testing.assert_close(got[before:], new[before:], atol=1e-5, rtol=0)
    return len(got) - before


@pytest.mark.parametrize(("steps", "ahead"), [(0, False), (2, False), (0, True)])
def test_retracted_requests_are_recomputed_with_the_new_weights(steps, ahead):
    serving, answers = swapped("retract", steps=steps, ahead=ahead)
    with serving:
        after = [
            assert_split(prompt, answer.completion, exact_after=True)
            for prompt, answer in zip(PROMPTS, answers, strict=True)
        ]
        assert sum(after) > 0
        assert sum(answer.preemptions for answer in answers) > 0
        assert serving.audit() == []


def test_a_recomputed_prompt_has_logprobs_of_the_new_weights():
    """Half of it was prefilled before the update: none of its log-probabilities is of the old
    weights."""
    prompt = tuple(tokens(60, seed=5).tolist())
    scored = SimpleQueue()

    def deliver(delta):  # on the engine's thread, between two steps
        loop = serving._loop
        prefilling = [s.num_computed for s in loop.scheduler.running if s.id == "scored"]
        if loop.scheduler.version == 0 and prefilling and 16 <= prefilling[0] < 50:
            loop.run_between_steps(lambda: loop.update_weights(load_other, 1, "retract"))

    with engine(copy_of(network("sparse")), max_prefill_tokens=4) as serving:
        serving.pause()
        serving.submit(greedy(PROMPTS[0], 60), deliver, streamed=True)
        request = greedy(prompt, 1, id="scored", prompt_logprobs_start=0, top_logprobs=1)
        serving.submit(request, scored.put)
        serving.resume()
        answer = scored.get().output
    assert answer.preemptions == 1
    got = torch.tensor(answer.prompt_logprobs[1:])
    torch.testing.assert_close(got, logprobs_of(other(), prompt[:1], prompt[1:]), atol=1e-5, rtol=0)
    assert len(answer.prompt_top_logprobs) == len(prompt)


@pytest.mark.parametrize("steps", [0, 2])
def test_requests_in_place_continue_with_their_old_kv_entries(steps):
    serving, answers = swapped("in_place", steps=steps)
    with serving:
        after, differs = 0, False
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            after += assert_split(prompt, answer.completion, exact_after=False)
            new = logprobs_of(other(), prompt, answer.completion.token_ids)
            got = torch.tensor(answer.completion.logprobs)
            differs |= bool((got - new)[answer.completion.versions[0].tokens :].abs().max() > 1e-3)
        assert after > 0
        assert differs  # or the KV entries were recomputed after all
        assert sum(answer.preemptions for answer in answers) == 0
        # New requests, even with a cached text, are served by the new weights.
        again = [p + a.completion.token_ids for p, a in zip(PROMPTS, answers, strict=True)]
        for prompt, answer in zip(again, serving.generate_outputs(map(greedy, again)), strict=True):
            assert_greedy(other(), prompt, answer.completion)
        assert serving.audit() == []


def test_aborted_requests_keep_their_old_tokens():
    serving, answers = swapped("abort")
    with serving:
        assert any(answer.completion.finish == "abort" for answer in answers)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert_greedy(network("sparse"), prompt, answer.completion)
            assert [s.version for s in answer.completion.versions] == [0]
        for prompt, answer in zip(
            PROMPTS, serving.generate_outputs(map(greedy, PROMPTS)), strict=True
        ):
            assert_greedy(other(), prompt, answer.completion)
            assert [s.version for s in answer.completion.versions] == [1]
        assert serving.audit() == []


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_the_prefix_cache_does_not_cross_versions(mode):
    with engine(copy_of(network("sparse"))) as serving:
        serving.generate_outputs(map(greedy, PROMPTS))
        serving.update_weights(load_other, 1, mode)
        for prompt, answer in zip(
            PROMPTS, serving.generate_outputs(map(greedy, PROMPTS)), strict=True
        ):
            assert answer.cached_tokens == 0
            assert_greedy(other(), prompt, answer.completion)


def test_a_cache_salt_separates_requests():
    prompt = tuple(range(20))
    with engine(network("sparse")) as serving:
        serving.generate_output(greedy(prompt, 2, cache_salt="a"))
        assert serving.generate_output(greedy(prompt, 2, cache_salt="b")).cached_tokens == 0
        assert serving.generate_output(greedy(prompt, 2, cache_salt="a")).cached_tokens == 16


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_changes_no_reply(mode):
    async def main(serving):
        started = asyncio.Event()

        async def reply(prompt):
            async for delta in serving.stream(greedy(prompt, 60)):
                started.set()
                if delta.output is not None:
                    return delta.output

        with paused_once_started(serving):
            tasks = [asyncio.create_task(reply(prompt)) for prompt in PROMPTS]
            await started.wait()
            await asyncio.to_thread(serving.pause, mode)
            steps = serving.stats().counters.steps
            await asyncio.sleep(0.03)
            assert serving.stats().counters.steps == steps
            assert serving.stats().paused
            assert (serving.stats().running == 0) == (mode == "retract")
        return await asyncio.gather(*tasks)

    with engine(network("counting"), num_speculative_tokens=2) as serving:
        for prompt, answer in zip(PROMPTS, asyncio.run(main(serving)), strict=True):
            assert_greedy(network("counting"), prompt, answer.completion)


def test_a_pause_may_abort_all_requests():
    got = []
    with engine(network("sparse")) as serving:
        serving.pause("in_place")
        for prompt in PROMPTS:
            serving.submit(greedy(prompt), got.append)
        serving.pause("abort")
        assert [delta.output.completion.finish for delta in got] == ["abort"] * len(PROMPTS)
        serving.resume()
        assert serving.generate_output(greedy((1, 2))).completion.finish == "length"


def test_a_failed_load_is_raised_and_the_engine_keeps_serving():
    def fail(net):
        raise ValueError("shape of 'head.weight'")

    with engine(copy_of(network("sparse"))) as serving:
        with pytest.raises(ValueError, match="shape of 'head"):
            serving.update_weights(fail, 1)
        assert serving.version == 0
        assert_greedy(network("sparse"), (1, 2), serving.generate_output(greedy((1, 2))).completion)


def test_the_cache_is_not_flushed_while_a_request_runs():
    with engine(network("sparse")) as serving:
        serving.generate_output(greedy(tuple(range(20)), 2))
        assert serving.stats().pages_cached > 0
        serving.pause("in_place")
        serving.submit(
            Request(token_ids=(1,), sampling_params=SamplingParams(max_new_tokens=2)),
            lambda d: None,
        )
        assert not serving.flush_cache()
        serving.abort_all()
        assert serving.flush_cache()
        assert serving.stats().pages_used == 0
