"""Request options, their results, and the errors of invalid requests."""

import asyncio
from functools import cache

import pytest
import torch

from paddock.config import ConfigError
from paddock.engine import Engine, EngineError, EngineSettings, InvalidRequestError, Request
from paddock.engine.request import DuplicateRequestIdError
from paddock.engine.stop_strings import StopStringChecker
from paddock.engine.thinking_budget import ThinkingBudget
from paddock.records import LogitBias, SamplingParams
from paddock.text import SpecialToken, Tokenizer, train_tokenizer
from tests.engine.networks import (
    assert_greedy,
    engine,
    generate_as_one_batch,
    greedy,
    network,
    prompts,
)
from tests.model.networks import VOCAB, build_network, grouped_config, latent_config

PROMPTS = prompts(6, seed=2)


@cache
def tokenizer() -> Tokenizer:
    return train_tokenizer(["hello world, how are you"] * 3, vocab=300)


@cache
def text_network():
    return build_network(latent_config(vocab=300), seed=3)


def serving(**settings):
    return engine(text_network(), tokenizer(), **settings)


def ids(text):
    return tuple(tokenizer().encode(text, specials=True))


# --- stop conditions ------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 3])
def test_a_stop_token_ends_the_reply_and_is_included(steps):
    prompt = PROMPTS[0]
    with engine(network("counting"), num_speculative_tokens=steps) as counting:
        whole = counting.generate_output(greedy(prompt, 20)).completion.token_ids
        for stop in sorted(set(whole))[:6]:
            sampling = SamplingParams(temperature=0.0, max_new_tokens=20, stop_token_ids=(stop,))
            answer = counting.generate_output(Request(token_ids=prompt, sampling_params=sampling))
            assert answer.completion.token_ids == whole[: whole.index(stop) + 1]
            assert (answer.completion.finish, answer.matched_stop) == ("stop", stop)
        for length in (1, 2, 4):
            short = counting.generate_output(greedy(prompt, length))
            assert short.completion.token_ids == whole[:length]
            assert short.completion.finish == "length"


def test_eos_can_be_ignored_and_delayed():
    prompt = PROMPTS[0]
    with engine(network("sparse")) as plain:
        whole = plain.generate_output(greedy(prompt, 12)).completion.token_ids
    with engine(network("sparse"), stop_token_ids=(whole[2],)) as ending:
        first = whole.index(whole[2])
        assert len(ending.generate_output(greedy(prompt, 12)).completion.token_ids) == first + 1
        ignoring = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
        assert ending.generate(prompt, ignoring).token_ids == whole
        late = SamplingParams(temperature=0.0, max_new_tokens=12, min_new_tokens=6)
        reply = ending.generate(prompt, late).token_ids
        assert len(reply) >= 6
        assert whole[2] not in reply[:5]


@pytest.mark.parametrize("beyond", [-1, VOCAB, 151336])
def test_a_stop_token_outside_the_vocabulary_has_no_effect(beyond):
    with engine(build_network(latent_config(eos=(beyond,))), stop_token_ids=None) as serving:
        assert not serving.stop_ids
        wanted = SamplingParams(temperature=0.0, max_new_tokens=4, min_new_tokens=2)
        assert len(serving.generate(PROMPTS[0], wanted).token_ids) == 4


def test_stop_strings_are_found_across_tokens():
    stops = StopStringChecker(("o wor", "ll", "zzz"), tokenizer())
    tokens = ids("hello world")
    assert [stops.feed(token) for token in ids("he")] == [None] * len(ids("he"))
    spelled = StopStringChecker(("o wor",), tokenizer())
    found = [spelled.feed(token) for token in tokens]
    done = tokenizer().decode(tokens[: found.index("o wor") + 1])
    assert "o wor" in done
    assert "o wor" not in tokenizer().decode(tokens[: found.index("o wor")])


def test_a_stop_string_may_start_with_the_leading_space():
    words = train_tokenizer(["one two three four"] * 9, vocab=300, splitting="words")
    prompt, (four,) = words.encode("one two", specials=False), words.encode("four", specials=False)
    only = (LogitBias(four, 100.0),)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=3, stop=(" four",), logit_bias=only)
    with engine(text_network(), words) as engine_:
        answer = engine_.generate_output(Request(token_ids=tuple(prompt), sampling_params=sampling))
    assert (answer.completion.token_ids, answer.matched_stop) == ((four,), " four")


@pytest.mark.parametrize("steps", [0, 2])
def test_a_stop_string_ends_the_reply(steps):
    prompt = ids("hello")
    with serving(num_speculative_tokens=steps) as engine:
        whole = engine.generate_output(greedy(prompt, 20)).completion.token_ids
        text = tokenizer().decode(whole[3:5])
        sampling = SamplingParams(temperature=0.0, max_new_tokens=20, stop=(text, "never said"))
        answer = engine.generate_output(Request(token_ids=prompt, sampling_params=sampling))
        assert answer.matched_stop == text
        assert whole[: len(answer.completion.token_ids)] == answer.completion.token_ids
        assert text in tokenizer().decode(answer.completion.token_ids)
        assert text not in tokenizer().decode(answer.completion.token_ids[:-1])


# --- thinking -------------------------------------------------------------------------------------

OPEN, CLOSE = SpecialToken.THINK_OPEN, SpecialToken.THINK_CLOSE


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<|user|>hi<|assistant|><think>", True),
        ("<|user|>hi<|assistant|><think>hello", True),
        ("<|user|>hi<|assistant|></think>", False),
        ("<|user|>hi<|assistant|><think>hello</think>", False),
        ("<|assistant|><think>hello<|user|>", False),
        ("<|user|>hi<|assistant|><think>hello<tool_call>hello", False),
        ("hello", False),
    ],
)
def test_thinking_is_detected_from_the_prompt(prompt, is_open):
    assert (
        ThinkingBudget.from_prompt(ids(prompt), tokenizer().special_token_ids, budget=3).is_open
        == is_open
    )


@pytest.mark.parametrize("steps", [0, 1, 3, 5])
@pytest.mark.parametrize("budget", [0, 1, 2, 5])
def test_a_thinking_budget_closes_the_thinking_and_is_reported(steps, budget):
    specials = tokenizer().special_token_ids
    prompt = ids("<|user|>hi<|assistant|><think>")
    keep_thinking = (LogitBias(specials[CLOSE], -100.0), LogitBias(specials[OPEN], -100.0))
    sampling = SamplingParams(
        temperature=0.0, max_new_tokens=9, thinking_budget=budget, logit_bias=keep_thinking
    )
    with serving(num_speculative_tokens=steps) as engine:
        answer = engine.generate_output(Request(token_ids=prompt, sampling_params=sampling))
    reply = answer.completion
    assert reply.token_ids.index(specials[CLOSE]) == budget
    assert reply.forced == (budget,)
    assert reply.token_ids.count(specials[CLOSE]) == 1
    assert answer.reasoning_tokens == budget
    assert len(reply.token_ids) == 9
    with torch.no_grad():
        logp = text_network().logits(prompt + reply.token_ids)[len(prompt) - 1 : -1].log_softmax(-1)
    wanted = logp.gather(1, torch.tensor(reply.token_ids).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(torch.tensor(reply.logprobs), wanted, atol=1e-5, rtol=0)


def test_thinking_opened_by_the_reply_counts_too():
    specials = tokenizer().special_token_ids
    thinking = ThinkingBudget.from_prompt(ids("hello"), specials, budget=2)
    assert thinking.forced_rows([specials[OPEN], 5, 6, 7]) == [3, 4]
    assert thinking.forced_rows([specials[OPEN], 5, specials[CLOSE], 7]) == []


@pytest.mark.parametrize("steps", [0, 3])
def test_a_tool_call_does_not_count_as_thinking(steps):
    specials = tokenizer().special_token_ids
    silent = tuple(LogitBias(specials[mark], -100.0) for mark in (OPEN, CLOSE))
    sampling = SamplingParams(
        temperature=0.0, max_new_tokens=9, thinking_budget=1, logit_bias=silent
    )
    prompt = ids("<|user|>hi<|assistant|><think><tool_call>he")
    with serving(num_speculative_tokens=steps) as engine:
        answer = engine.generate_output(Request(token_ids=prompt, sampling_params=sampling))
    assert answer.completion.forced == ()
    assert answer.reasoning_tokens == 0
    thinking = ThinkingBudget.from_prompt(ids("<think>"), specials, budget=2)
    called = [5, specials[SpecialToken.TOOL_CALL_OPEN], 6, 7, 8]
    assert thinking.forced_rows(called) == []
    for token in called:
        thinking.feed(token)
    assert (thinking.is_open, thinking.tokens) == (False, 1)


# --- log-probabilities ----------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"max_prefill_tokens": 5}, {"logits_chunk_bytes": 1000}])
@pytest.mark.parametrize("start", [0, 1, 7, 29])
def test_prompt_logprobs_match_a_forward_pass(settings, start):
    prompt = tuple((prompts(1, seed=4)[0] * 30)[:29])
    net = network("sparse")
    with torch.no_grad():
        logp_TV = net.logits(prompt).log_softmax(-1)
    with engine(net, **settings) as scoring:
        scoring.generate_output(greedy(prompt, 1))  # cached prefix now
        request = greedy(
            prompt, 1, prompt_logprobs_start=start, top_logprobs=3, logprob_token_ids=(4, 9)
        )
        answer = scoring.generate_output(request)
    wanted = [None if i == 0 else float(logp_TV[i - 1, prompt[i]]) for i in range(start, 29)]
    assert [x is None for x in answer.prompt_logprobs] == [x is None for x in wanted]
    got = torch.tensor([x for x in answer.prompt_logprobs if x is not None])
    want = torch.tensor([x for x in wanted if x is not None])
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    for i, top, at_ids in zip(
        range(start, 29), answer.prompt_top_logprobs, answer.prompt_requested_logprobs, strict=True
    ):
        if i:
            best = logp_TV[i - 1].topk(3)
            assert top.token_ids == tuple(best.indices.tolist())
            assert at_ids.logprobs == pytest.approx(logp_TV[i - 1, [4, 9]].tolist(), abs=1e-5)


@pytest.mark.parametrize("steps", [0, 3])
def test_top_and_requested_logprobs_come_with_every_token(steps):
    net, prompt = network("counting"), PROMPTS[1]
    with engine(net, num_speculative_tokens=steps) as engine_:
        answer = engine_.generate_output(
            greedy(prompt, 9, top_logprobs=4, logprob_token_ids=(0, 3))
        )
    assert len(answer.top_logprobs) == len(answer.requested_logprobs) == 9
    with torch.no_grad():
        logp = net.logits(prompt + answer.completion.token_ids)[len(prompt) - 1 : -1].log_softmax(
            -1
        )
    for row, top, at_ids, token in zip(
        logp,
        answer.top_logprobs,
        answer.requested_logprobs,
        answer.completion.token_ids,
        strict=True,
    ):
        assert top.token_ids == tuple(row.topk(4).indices.tolist())
        assert top.token_ids[0] == token
        assert at_ids.logprobs == pytest.approx(row[[0, 3]].tolist(), abs=1e-5)


# --- streams, priorities, errors ------------------------------------------------------------------


def test_deltas_add_up_to_the_output():
    async def main(engine):
        request = greedy(PROMPTS[0], 12, top_logprobs=2)
        return [delta async for delta in engine.stream(request)]

    with engine(network("counting"), num_speculative_tokens=2) as streaming:
        deltas = asyncio.run(main(streaming))
    answer = deltas[-1].output
    assert all(delta.output is None for delta in deltas[:-1])
    assert tuple(t for d in deltas for t in d.token_ids) == answer.completion.token_ids
    assert tuple(x for d in deltas for x in d.logprobs) == answer.completion.logprobs
    assert tuple(x for d in deltas for x in d.top_logprobs) == answer.top_logprobs
    assert len(deltas) == answer.verify_steps


def test_higher_priority_is_scheduled_first():
    order = []
    with engine(network("sparse"), max_running_requests=1) as busy:
        busy.pause("in_place")
        for name, priority in [("a", 0), ("b", 0), ("c", 5), ("d", -1), ("e", 5)]:
            request = greedy((1, 2, 3), 2, id=name, priority=priority)
            busy.submit(request, lambda delta, name=name: order.append(name))
        busy.resume()
        busy.generate_output(greedy((1,), 1, priority=-9))
    assert order == ["c", "e", "a", "b", "d"]


def test_lower_priority_is_preempted():
    with engine(network("sparse"), num_pages=32, context_length=100, prefix_caching=False) as busy:
        requests = [greedy((i, 2, 3), 60, priority=int(i == 3)) for i in range(4)]
        answers = generate_as_one_batch(busy, requests)
        assert answers[3].preemptions == 0
        assert sum(answer.preemptions for answer in answers[:3]) > 0
        for request, answer in zip(requests, answers, strict=True):
            assert_greedy(network("sparse"), request.token_ids, answer.completion)


LONG = tuple(range(40)) * 4
REFUSED = [
    (Request(token_ids=()), "the prompt is empty"),
    (Request(token_ids=LONG), "has 160 tokens, which leaves no room .* context of 128"),
    (
        Request(token_ids=LONG[:100], sampling_params=SamplingParams(max_new_tokens=29)),
        "100 tokens and max_new_tokens is 29, together 129, .* context of 128",
    ),
    (Request(token_ids=(1, 2.5)), "the prompt: token ids must be integers, got 2.5"),
    (Request(token_ids=(1, True)), "the prompt: token ids must be integers, got True"),
    (Request(token_ids=(1, 50)), r"the prompt: token id 50 is not in \[0, 50\)"),
    (Request(token_ids=(1, -1)), r"the prompt: token id -1 is not in"),
    (
        Request(token_ids=(1,), sampling_params=SamplingParams(stop_token_ids=(99,))),
        "stop_token_ids: token id 99",
    ),
    (
        Request(token_ids=(1,), sampling_params=SamplingParams(logit_bias=(LogitBias(77, 1.0),))),
        "logit_bias: token id 77",
    ),
    (Request(token_ids=(1,), logprob_token_ids=(50,)), "logprob_token_ids: token id 50"),
    (Request(token_ids=(1,), top_logprobs=65), r"top_logprobs must be in \[0, 64\], got 65"),
    (Request(token_ids=(1,), prompt_logprobs_start=3), r"start must be in \[0, 1\], got 3"),
    (Request(token_ids=(1,), return_routing=True), "'capture_routing', which is off"),
    (
        Request(token_ids=(1,), sampling_params=SamplingParams(stop=("x",))),
        "need an engine with a tok",
    ),
]


def test_invalid_requests_are_rejected_with_the_numbers():
    with engine(network("sparse")) as refusing:
        for request, why in REFUSED:
            with pytest.raises(InvalidRequestError, match=why):
                refusing.generate_output(request)
        assert refusing.generate_output(greedy((1, 2), 3)).completion.finish == "length"
        assert refusing.audit() == []


def test_an_id_can_be_used_again_only_when_it_is_free():
    with engine(network("sparse")) as engine_:
        engine_.pause("in_place")
        engine_.submit(greedy((1,), 2, id="x"), lambda delta: None)
        with pytest.raises(DuplicateRequestIdError, match="'x' is already in use"):
            engine_.submit(greedy((1,), 2, id="x"), lambda delta: None)
        engine_.resume()
        engine_.generate_output(greedy((1,), 9))
        assert engine_.generate_output(greedy((1,), 2, id="x")).id == "x"


@pytest.mark.parametrize(
    ("config", "settings", "why"),
    [
        (latent_config(), {"context_length": 300}, "'context_length' 300 exceeds the model's 256"),
        (latent_config(), {"num_pages": 3}, "256 tokens needs 16 pages of 16 tokens .* has 3"),
        (latent_config(mtp=None), {"num_speculative_tokens": 1}, "the model has no MTP layer"),
        (
            latent_config(mtp={"share_index": True}),
            {"num_speculative_tokens": 2},
            "'index_share_for_mtp_it",
        ),
        (grouped_config("gdn"), {}, "'prefix_caching' must be false: gdn layers"),
    ],
)
def test_invalid_settings_are_rejected_with_the_numbers(config, settings, why):
    with pytest.raises(ConfigError, match=why):
        Engine(build_network(config), None, EngineSettings(**settings))


def test_nan_logits_fail_the_request_not_the_engine():
    net = build_network(latent_config(), seed=5)
    with torch.no_grad():
        net.embed.weight[VOCAB - 1] = float("nan")
    with engine(net) as hurt:
        for _ in range(2):
            with pytest.raises(EngineError, match="logits at token 30 are not finite"):
                hurt.generate_output(greedy((VOCAB - 1,) * 30, 4))
        assert hurt.healthy
        requests = [greedy(prompt, 9) for prompt in ((1, 2), (3,), (4, 5, 6))]
        for request, answer in zip(requests, hurt.generate_outputs(requests), strict=True):
            assert_greedy(net, request.token_ids, answer.completion)
        assert hurt.audit() == []


def test_an_exception_fails_every_request_and_is_kept():
    net = build_network(latent_config(), seed=6)
    with engine(net) as broken:
        broken.run_between_steps(lambda net: setattr(net.layers[1], "forward", None)).result()
        with pytest.raises(EngineError, match="the engine failed: TypeError"):
            broken.generate_output(greedy((1, 2), 4))
        assert not broken.healthy
        with pytest.raises(EngineError, match="the engine failed"):
            broken.generate_output(greedy((1, 2), 4))
        assert broken.stats().pages_used == 0


def test_a_closed_engine_rejects_requests_without_hanging():
    closed = engine(network("sparse"))
    closed.pause("in_place")
    got = []
    closed.submit(greedy((1, 2), 4), got.append)
    closed.close()
    assert got[0].output.completion.finish == "abort"
    with pytest.raises(EngineError, match="closed"):
        closed.generate_output(greedy((1, 2), 4))
    with pytest.raises(EngineError, match="closed"):
        closed.stats()
