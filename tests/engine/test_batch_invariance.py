"""Batch invariance: a request gets the same reply and log-probabilities as when served alone."""

import asyncio

import pytest
import torch

from paddock.engine import Request
from paddock.records import SamplingParams
from tests.engine.networks import (
    assert_greedy,
    assert_scores,
    copy_of,
    engine,
    generate_as_one_batch,
    greedy,
    network,
    prompts,
)
from tests.model.networks import tokens

PROMPTS = prompts(32)
FEW = PROMPTS[:12]
COUNT = 12


def settings_for(kind, **settings):
    return settings | ({"prefix_caching": False} if kind == "recurrent" else {})


def check(kind, answers):
    for i, answer in enumerate(answers):
        assert len(answer.completion.token_ids) == COUNT
        assert_greedy(network(kind), PROMPTS[i], answer.completion)


PRESSED = {"num_pages": 40, "context_length": 64}
CONDITIONS = {
    "batch of 32": {},
    "chunks": {"max_prefill_tokens": 7},
    "few at a time": {"max_running_requests": 3},
    "large pages": {"page_size": 64},
    "no prefix cache": {"prefix_caching": False},
    "no pages to spare": PRESSED,
}
OTHERS = ["shared", "dense", "grouped", "recurrent"]
CASES = [("sparse", condition) for condition in CONDITIONS]
CASES += [(kind, c) for kind in OTHERS for c in ("chunks", "no pages to spare")]


@pytest.mark.parametrize(("kind", "condition"), CASES)
def test_greedy_replies_do_not_depend_on_batching(kind, condition):
    settings = settings_for(kind, **CONDITIONS[condition])
    with engine(network(kind), **settings) as serving:
        batch = PROMPTS if condition == "batch of 32" else FEW
        check(kind, generate_as_one_batch(serving, [greedy(prompt, COUNT) for prompt in batch]))
        if condition == "no pages to spare":
            assert serving.stats().preemptions > 0
        assert serving.audit() == []


@pytest.mark.parametrize(
    ("kind", "steps"),
    [("counting", 1), ("counting", 5), ("sparse", 3), ("shared", 2), ("dense", 3)],
)
def test_drafts_do_not_change_replies(kind, steps):
    with engine(network(kind), num_speculative_tokens=steps) as serving:
        check(kind, serving.generate_outputs([greedy(prompt, COUNT) for prompt in FEW]))
        again = serving.generate_outputs([greedy(prompt, COUNT) for prompt in FEW])
        check(kind, again)
        assert sum(answer.cached_tokens for answer in again) > 0
        if kind == "counting":
            assert serving.stats().accept_length > 1.15
        assert serving.audit() == []


@pytest.mark.parametrize("condition", ["chunks", "few at a time", "no pages to spare"])
def test_drafts_with_a_full_kv_cache(condition):
    with engine(network("counting"), num_speculative_tokens=3, **CONDITIONS[condition]) as serving:
        check("counting", generate_as_one_batch(serving, [greedy(prompt, COUNT) for prompt in FEW]))
        if condition == "no pages to spare":
            assert serving.stats().preemptions > 0
        assert serving.audit() == []


@pytest.mark.parametrize("kind", ["sparse", "grouped", "recurrent"])
def test_alone(kind):
    with engine(network(kind), **settings_for(kind)) as serving:
        check(kind, [serving.generate_output(greedy(prompt, COUNT)) for prompt in PROMPTS[:3]])


@pytest.mark.parametrize(("kind", "steps"), [("sparse", 0), ("sparse", 3), ("grouped", 0)])
def test_cached_prefixes_are_not_recomputed(kind, steps):
    with engine(network(kind), num_speculative_tokens=steps) as serving:
        check(kind, serving.generate_outputs([greedy(prompt, COUNT) for prompt in FEW]))
        before = serving.stats()
        check(kind, serving.generate_outputs([greedy(prompt, COUNT) for prompt in FEW]))
        after = serving.stats()
        found = after.prefix_cache_hit_tokens - before.prefix_cache_hit_tokens
        # All but the last page of each prompt, whose last token is always computed.
        assert found == sum((len(prompt) - 1) // 4 * 4 for prompt in FEW)
        total = sum(map(len, FEW))
        assert after.counters.prefill_tokens - before.counters.prefill_tokens == total - found


def test_a_conversation_reuses_its_cached_turns():
    with engine(network("counting"), num_speculative_tokens=2) as serving:
        prompt = PROMPTS[0]
        for _ in range(3):
            answer = serving.generate_output(greedy(prompt, 11))
            assert_greedy(network("counting"), prompt, answer.completion)
            assert answer.cached_tokens >= (len(prompt) - 13) // 4 * 4
            prompt = prompt + answer.completion.token_ids + (1, 2)


def test_a_shared_prefix_is_prefilled_once():
    shared = tuple(tokens(40).tolist())
    prompts_ = [(*shared, i) for i in range(8)]
    with engine(network("sparse")) as serving:
        answers = serving.generate_outputs([greedy(prompt, 4) for prompt in prompts_])
        for prompt, answer in zip(prompts_, answers, strict=True):
            assert_greedy(network("sparse"), prompt, answer.completion)
        assert serving.stats().counters.prefill_tokens == 41 + 7


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_updating_to_the_same_weights_changes_nothing(mode, steps):
    same = network("counting").state_dict()

    async def main(serving):
        async def reply(prompt):
            return [delta async for delta in serving.stream(greedy(prompt, COUNT))][-1].output

        tasks = [asyncio.create_task(reply(prompt)) for prompt in FEW]
        for version in range(1, 5):
            await asyncio.sleep(0.02)
            await asyncio.to_thread(
                serving.update_weights, lambda net: net.load_state_dict(same), version, mode
            )
        return await asyncio.gather(*tasks)

    with engine(copy_of(network("counting")), num_speculative_tokens=steps) as serving:
        check("counting", asyncio.run(main(serving)))
        assert serving.version == 4
        assert serving.audit() == []


SAMPLING = {
    "plain": SamplingParams(max_new_tokens=COUNT, seed=3),
    "cold": SamplingParams(max_new_tokens=COUNT, seed=3, temperature=0.6),
    "truncated": SamplingParams(max_new_tokens=COUNT, seed=4, top_p=0.8, top_k=12, min_p=0.02),
    "penalized": SamplingParams(
        max_new_tokens=COUNT,
        seed=5,
        temperature=1.3,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.2,
    ),
}


@pytest.mark.parametrize("name", SAMPLING)
def test_a_seed_determines_the_reply_in_any_batch(name):
    sampling = SAMPLING[name]
    requests = [Request(token_ids=prompt, sampling_params=sampling) for prompt in FEW]
    with engine(network("counting")) as serving:
        alone = [serving.generate_output(request).completion for request in requests[:4]]
        again = [answer.completion for answer in serving.generate_outputs(requests)]
    with engine(
        network("counting"), num_speculative_tokens=3, max_prefill_tokens=9, **PRESSED
    ) as serving:
        drafted = [answer.completion for answer in serving.generate_outputs(requests)]
        assert serving.stats().accept_length > 1.1
    assert [reply.token_ids for reply in alone] == [reply.token_ids for reply in again[:4]]
    assert [reply.token_ids for reply in again] == [reply.token_ids for reply in drafted]
    for prompt, one, other in zip(PROMPTS, again, drafted, strict=False):
        for reply in (one, other):
            assert_scores(network("counting"), prompt, reply, temperature=sampling.temperature)


def test_replies_differ_between_seeds_and_positions():
    with engine(network("sparse")) as serving:
        requests = [
            Request(token_ids=(7,), sampling_params=SamplingParams(max_new_tokens=12, seed=seed))
            for seed in range(30)
        ]
        replies = [answer.completion.token_ids for answer in serving.generate_outputs(requests)]
    assert len(set(replies)) == 30
    first = torch.tensor([reply[0] for reply in replies])
    second = torch.tensor([reply[1] for reply in replies])
    assert int((first == second).sum()) < 10
