"""Asynchronous scheduling: a step is launched before the one before it is read, and no reply,
log-probability, page or weight version depends on it."""

from queue import SimpleQueue

import pytest
import torch

from paddock.engine import EngineError, Request
from paddock.records import LogitBias, SamplingParams
from tests.engine.networks import (
    assert_greedy,
    copy_of,
    engine,
    generate_as_one_batch,
    greedy,
    network,
    prompts,
)
from tests.model.networks import VOCAB

PROMPTS = prompts(8, seed=3)


def spied(serving):
    """The calls of the runner, in order: ("launch" or "read", number of the step)."""
    runner, calls, steps = serving._loop.runner, [], []
    launch, read = runner.launch_step, runner.read_step

    def launched(step, *rest):
        calls.append(("launch", len(steps)))
        steps.append(launch(step, *rest))
        return steps[-1]

    def was_read(step, *rest):
        calls.append(("read", next(i for i, each in enumerate(steps) if each is step)))
        return read(step, *rest)

    runner.launch_step, runner.read_step = launched, was_read
    return calls


def overlapped(calls):
    """How many steps were launched before the one before was read."""
    at = {call: i for i, call in enumerate(calls)}
    return sum(at["launch", n] < at["read", n - 1] for call, n in calls if call == "launch" and n)


def test_a_step_is_launched_before_the_last_is_read():
    with engine(network("sparse"), async_scheduling=True) as serving:
        calls = spied(serving)
        generate_as_one_batch(serving, [greedy(prompt, 12) for prompt in PROMPTS])
        serving.stats()
    steps = sum(call == "launch" for call, _ in calls)
    assert steps == 12  # the length is known ahead: no extra step
    assert overlapped(calls) == steps - 1
    assert [n for call, n in calls if call == "read"] == list(range(steps))


def test_a_cpu_engine_is_synchronous_unless_told_otherwise():
    with engine(network("sparse")) as serving:
        calls = spied(serving)
        serving.generate_output(greedy(PROMPTS[0], 6))
        serving.stats()
    assert overlapped(calls) == 0


SYNCHRONOUS = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.4,
}


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_penalties_read_every_token_before_the_next_step(name):
    params = SamplingParams(temperature=0.0, max_new_tokens=8, **{name: SYNCHRONOUS[name]})
    with engine(network("sparse"), async_scheduling=True) as serving:
        calls = spied(serving)
        serving.generate_output(Request(token_ids=PROMPTS[0], sampling_params=params))
        serving.stats()
    assert overlapped(calls) == 0


@pytest.mark.parametrize("settings", [{"num_speculative_tokens": 2}, {"capture_routing": True}])
def test_drafts_and_routing_capture_are_synchronous(settings):
    with engine(network("counting"), async_scheduling=True, **settings) as serving:
        calls = spied(serving)
        answer = serving.generate_output(greedy(PROMPTS[0], 8))
        assert_greedy(network("counting"), PROMPTS[0], answer.completion)
        serving.stats()
    assert overlapped(calls) == 0


def various():
    """Requests that end, constrain and score in all ways that need no tokenizer."""
    changes = [  # the first reads its tokens on the host, and ends first
        {"temperature": 1.0, "seed": 11, "frequency_penalty": 0.6},
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.8, "top_p": 0.7, "seed": 6},
        {"temperature": 1.0, "top_k": 5, "min_p": 0.02, "seed": 7},
        {"temperature": 1.0, "seed": 8, "stop_token_ids": tuple(range(0, VOCAB, 4))},
        {"temperature": 1.0, "seed": 9, "stop_token_ids": (1, 3, 5, 7), "min_new_tokens": 6},
        {"temperature": 1.0, "seed": 10, "logit_bias": (LogitBias(3, 4.0),)},
    ]
    return [
        Request(
            token_ids=prompt,
            sampling_params=SamplingParams(max_new_tokens=5 + 3 * i, **change),
            top_logprobs=2 * (i % 2),
            prompt_logprobs_start=0 if i == 3 else None,
        )
        for i, (prompt, change) in enumerate(zip(PROMPTS, changes, strict=True))
    ]


@pytest.mark.parametrize("kind", ["sparse", "grouped", "recurrent"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_prefill_tokens": 7}, {"num_pages": 40, "context_length": 64}],
    ids=["plain", "chunks", "no pages to spare"],
)
@pytest.mark.parametrize("omitted", [0, 1], ids=["with penalties", "without penalties"])
def test_replies_do_not_depend_on_it(kind, settings, omitted):
    settings = settings | ({"prefix_caching": False} if kind == "recurrent" else {})
    requests, found = various()[omitted:], []
    for ahead in (False, True):
        with engine(network(kind), async_scheduling=ahead, **settings) as serving:
            calls = spied(serving)
            found.append(generate_as_one_batch(serving, requests))
            assert serving.audit() == []
            assert (overlapped(calls) > 0) == ahead
    for expected, got in zip(*found, strict=True):
        assert got.completion.token_ids == expected.completion.token_ids
        assert got.completion.finish == expected.completion.finish
        assert got.matched_stop == expected.matched_stop
        assert [x.token_ids for x in got.top_logprobs] == [
            x.token_ids for x in expected.top_logprobs
        ]
        assert got.completion.logprobs == pytest.approx(expected.completion.logprobs, abs=1e-5)
        assert len(got.prompt_logprobs) == len(expected.prompt_logprobs)


def test_the_prefix_cache_holds_the_same_pages():
    held = []
    for ahead in (False, True):
        with engine(network("sparse"), async_scheduling=ahead) as serving:
            for request in various()[1:]:
                serving.generate_output(request)
            stats = serving.stats()
            held.append((stats.pages_used, stats.pages_cached))
            turn = serving.generate_output(various()[5])
            again = (*PROMPTS[5], *turn.completion.token_ids)
            answer = serving.generate_output(greedy(again, 6))
            assert answer.cached_tokens == (len(again) - 1) // 4 * 4
            assert_greedy(network("sparse"), again, answer.completion)
            assert serving.flush_cache()
            assert serving.stats().pages_used == 0
    assert held[0] == held[1]


def test_graph_batches_take_tokens_on_the_device():
    """Copies that pad a batch must take the token of the sequence they copy."""
    with engine(network("dense"), async_scheduling=True, cuda_graphs=True) as serving:
        calls = spied(serving)
        answers = generate_as_one_batch(serving, [greedy(prompt, 10) for prompt in PROMPTS[:5]])
        for prompt, answer in zip(PROMPTS, answers, strict=False):
            assert_greedy(network("dense"), prompt, answer.completion)
        assert overlapped(calls) > 0
        assert serving._loop.runner.graphs.count > 0


def test_an_abort_during_a_step_keeps_every_token_read():
    inbox = SimpleQueue()

    def deliver(delta):  # on the engine thread, while the next step is in flight
        if delta.output is None and len(seen) < 3:
            seen.append(delta.token_ids)
            if len(seen) == 3:
                serving.abort("one")
        elif delta.output is not None:
            inbox.put(delta.output)

    seen = []
    with engine(network("sparse"), async_scheduling=True) as serving:
        serving.submit(greedy(PROMPTS[0], 80, id="one"), deliver, streamed=True)
        answer = inbox.get()
        assert answer.completion.finish == "abort"
        assert_greedy(network("sparse"), PROMPTS[0], answer.completion)
        assert serving.audit() == []


def test_a_launch_without_memory_fails_its_requests_and_keeps_those_that_had_ended():
    with engine(network("sparse"), async_scheduling=True) as serving:
        runner = serving._loop.runner
        launch, launches = runner.launch_step, []

        def fails(step, previous, now):
            launches.append(step)
            if len(launches) == 5:
                raise torch.OutOfMemoryError("no memory")
            return launch(step, previous, now)

        runner.launch_step = fails
        ended, failed = SimpleQueue(), SimpleQueue()
        serving.pause("in_place")
        serving.submit(greedy(PROMPTS[0], 4), ended.put)
        serving.submit(greedy(PROMPTS[1], 40), failed.put)
        serving.resume()
        assert len(ended.get().output.completion.token_ids) == 4
        assert isinstance(failed.get(), EngineError)
        assert serving.healthy
        assert serving.audit() == []
        answer = serving.generate_output(greedy(PROMPTS[2], 6))
        assert_greedy(network("sparse"), PROMPTS[2], answer.completion)


def test_logits_that_are_not_finite_fail_one_request_and_poison_no_page():
    with engine(copy_of(network("dense")), async_scheduling=True) as serving:
        loop = serving._loop
        sample, calls = loop.runner.sampler.sample, []

        def spoiled(logits_NV, rows):
            calls.append(1)
            if len(calls) == 4:
                logits_NV = logits_NV.clone()
                logits_NV[0] = float("nan")
            return sample(logits_NV, rows)

        loop.runner.sampler.sample = spoiled
        inboxes = [SimpleQueue(), SimpleQueue()]
        serving.pause("in_place")
        for prompt, inbox in zip(PROMPTS, inboxes, strict=False):
            serving.submit(greedy(prompt, 12), inbox.put)
        serving.resume()
        replies = [inbox.get() for inbox in inboxes]
        assert sum(isinstance(reply, EngineError) for reply in replies) == 1
        (i,) = (i for i, reply in enumerate(replies) if not isinstance(reply, EngineError))
        assert_greedy(network("dense"), PROMPTS[i], replies[i].output.completion)
        assert serving.audit() == []
