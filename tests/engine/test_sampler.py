"""Samples have the right distribution, with and without drafts, under all sampling parameters."""

import math

import numpy as np
import pytest
import torch

from paddock.engine import Request
from paddock.engine.request import Sequence
from paddock.engine.sampler import (
    LogitConstraint,
    Sampler,
    SamplingBatchInfo,
    SamplingTable,
    apply_logit_constraints,
    random_bits,
)
from paddock.records import LogitBias, SamplingParams
from tests.engine.networks import engine
from tests.model.networks import build_network, latent_config

VOCAB = 20


def chi_square_bound(freedom):
    """Value that a chi-square statistic exceeds in 1 of 10,000 draws (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3


def assert_drawn_from(counts, prob):
    """Counts of independent draws fit the probabilities; rare outcomes are pooled."""
    counts, prob = np.asarray(counts, float), np.asarray(prob, float)
    assert counts[prob == 0].sum() == 0
    total = counts.sum()
    rare = prob * total < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(prob[~rare], prob[rare].sum()) * total
    counts, wanted = counts[wanted > 0], wanted[wanted > 0]
    statistic = ((counts - wanted) ** 2 / wanted).sum()
    assert statistic < chi_square_bound(len(wanted) - 1)


def sampler(rows, **sampling):
    table = SamplingTable(rows)
    for slot in range(rows):
        table.set(slot, SamplingParams(**sampling), seed=slot)
    return Sampler(table, VOCAB, torch.device("cpu"))


def rows(count, index=0, constraints=()):
    return SamplingBatchInfo(np.arange(count), np.full(count, index), list(constraints), [])


def sequence_of(sampling, prompt=(1, 2), reply=(), stop_token_ids=frozenset()):
    return Sequence(
        request=Request(token_ids=prompt, sampling_params=sampling),
        id="x",
        serial=0,
        seed=0,
        stop_token_ids=stop_token_ids,
        max_new_tokens=99,
        on_output=lambda delta: None,
        stream=False,
        arrived=0.0,
        tokens=[*prompt, *reply],
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_tempered_softmax(temperature):
    logits_V = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
    count = 20_000
    random_prompts = sampler(count, temperature=temperature).sample(
        logits_V.expand(count, -1), rows(count)
    )
    logp_V = (logits_V / temperature).log_softmax(-1)
    assert_drawn_from(random_prompts.token_N.bincount(minlength=VOCAB), logp_V.exp())
    torch.testing.assert_close(random_prompts.logprob_N, logp_V[random_prompts.token_N])


def test_positions_of_one_reply_are_independent():
    logits_NV = torch.zeros(8000, VOCAB)
    draw = sampler(1)
    index_N = np.arange(8000)
    token_N = draw.gumbel_argmax(logits_NV, np.zeros(8000, int), index_N)
    pair = token_N[0::2] * VOCAB + token_N[1::2]
    assert_drawn_from(pair.bincount(minlength=VOCAB**2), np.full(VOCAB**2, VOCAB**-2.0))


def test_no_two_positions_share_a_key():
    seeds, positions = np.meshgrid(np.arange(500), np.arange(500))
    assert len(np.unique(random_bits(seeds.ravel(), positions.ravel()))) == 250_000


def test_greedy_and_sampled_rows_in_one_batch():
    table = SamplingTable(2)
    table.set(0, SamplingParams(temperature=0.0), 0)
    table.set(1, SamplingParams(temperature=5.0), 0)
    draw = Sampler(table, VOCAB, torch.device("cpu"))
    logits_2V = torch.arange(VOCAB).float().expand(2, -1)
    got = [draw.sample(logits_2V, rows(2, index)).token_N.tolist() for index in range(50)]
    assert {greedy for greedy, _ in got} == {VOCAB - 1}
    assert len({other for _, other in got}) > 5


TRUNCATIONS = {
    "top-k": ({"top_k": 3}, [0.4, 0.3, 0.2]),
    "top-p": ({"top_p": 0.6}, [0.4, 0.3]),
    "top-p that ends exactly": ({"top_p": 0.7}, [0.4, 0.3]),
    "min-p": ({"min_p": 0.45}, [0.4, 0.3, 0.2]),
    # Of the survivors of top-k, 0.4 is 4/9 and 0.3 is 3/9.
    "top-p of top-k": ({"top_k": 3, "top_p": 0.5}, [0.4, 0.3]),
    "min-p of top-p": ({"top_p": 0.95, "min_p": 0.6}, [0.4, 0.3]),
    "at least one": ({"top_p": 0.01}, [0.4]),
    "all": ({"top_p": 1.0, "top_k": 4}, [0.4, 0.3, 0.2, 0.1]),
}


@pytest.mark.parametrize("name", TRUNCATIONS)
def test_truncation_keeps_the_most_likely_tokens(name):
    params, kept = TRUNCATIONS[name]
    prob_V = torch.tensor([0.1, 0.4, 0.2, 0.3])
    constraint = LogitConstraint(0, sequence_of(SamplingParams(**params)), [])
    found = apply_logit_constraints(
        prob_V.log().unsqueeze(0), torch.ones(1, 1), [constraint]
    ).softmax(-1)[0]
    assert torch.equal(found > 0, torch.isin(prob_V, torch.tensor(kept)))
    torch.testing.assert_close(found[found > 0] * sum(kept), prob_V[found > 0])


def test_ties_in_top_k_keep_the_first_tokens():
    constraint = LogitConstraint(0, sequence_of(SamplingParams(top_k=2)), [])
    found = apply_logit_constraints(torch.zeros(1, 5), torch.ones(1, 1), [constraint])
    assert torch.isfinite(found).tolist() == [[True, True, False, False, False]]


def test_penalties_count_the_reply_the_prompt_and_the_drafts():
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2.0)
    sequence = sequence_of(params, prompt=(0, 1), reply=(2, 2, 3))
    logits = torch.tensor([[1.0, -1.0, 3.0, 3.0, 3.0, 1.0]])
    found = apply_logit_constraints(
        logits, torch.ones(1, 1), [LogitConstraint(0, sequence, [3, 4])]
    )
    wanted = [
        0.5,  # in the prompt: halved
        -2.0,  # the same, below zero: doubled
        (3 - 2 * 0.5 - 0.25) / 2,
        (3 - 2 * 0.5 - 0.25) / 2,  # once in the reply, once among the drafts
        (3 - 0.5 - 0.25) / 2,
        1.0,
    ]
    torch.testing.assert_close(found[0], torch.tensor(wanted))


def test_logit_bias_and_min_new_tokens():
    params = SamplingParams(logit_bias=(LogitBias(1, 2.5), LogitBias(3, -1.0)), min_new_tokens=3)
    sequence = sequence_of(params, reply=(1,), stop_token_ids=frozenset({0}))
    early, late = LogitConstraint(0, sequence, [4]), LogitConstraint(1, sequence, [4, 4])
    found = apply_logit_constraints(torch.zeros(2, 5), torch.ones(2, 1), [early, late])
    assert found.tolist() == [[-math.inf, 2.5, 0, -1, 0], [0, 2.5, 0, -1, 0]]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_grammar_that_allows_only_eos_overrides_min_new_tokens(device):
    sequence = sequence_of(SamplingParams(min_new_tokens=3), stop_token_ids=frozenset({0}))
    over = torch.tensor([True, False, False])  # grammar masks are on the CPU, wherever logits are
    more = torch.tensor([True, False, True])
    constraints = [LogitConstraint(0, sequence, [], over), LogitConstraint(1, sequence, [], more)]
    found = apply_logit_constraints(
        torch.zeros(2, 3, device=device), torch.ones(2, 1, device=device), constraints
    )
    assert found.tolist() == [[0, -math.inf, -math.inf], [-math.inf, -math.inf, 0]]


def test_constraints_do_not_change_the_reported_logprob():
    logits_1V = torch.randn(1, VOCAB)
    params = LogitConstraint(
        0, sequence_of(SamplingParams(logit_bias=(LogitBias(5, 100.0),), top_k=1)), []
    )
    random_prompts = sampler(1).sample(logits_1V, rows(1, constraints=[params]))
    assert random_prompts.token_N.tolist() == [5]
    torch.testing.assert_close(random_prompts.logprob_N, logits_1V.log_softmax(-1)[:, 5])


PARAMS = {"top_p": 0.7, "temperature": 1.4, "frequency_penalty": 1.0}


@pytest.mark.parametrize(("steps", "params"), [(0, {}), (2, {}), (2, PARAMS)])
def test_replies_have_the_distribution_of_the_network(steps, params):
    """Three tokens over a vocabulary of five, drawn 700 times: all 125 replies are as frequent
    as the product of the constrained probabilities, drafted or not."""
    net = build_network(latent_config(vocab=5), seed=7)
    prompt = (1, 3, 0, 2, 4, 1, 1, 0, 3)
    prob = {(): 1.0}
    with torch.no_grad():
        for _ in range(3):
            grown = {}
            for reply, p in prob.items():
                constraint = LogitConstraint(
                    0, sequence_of(SamplingParams(**params), prompt=prompt, reply=reply), []
                )
                logits_1V = net.logits(prompt + reply)[-1:]
                temperature = torch.tensor([[params.get("temperature", 1.0)]])
                share_V = apply_logit_constraints(logits_1V, temperature, [constraint]).softmax(-1)[
                    0
                ]
                grown |= {(*reply, t): p * float(share_V[t]) for t in range(5)}
            prob = grown
    with engine(
        net, num_speculative_tokens=steps, max_running_requests=64, context_length=64
    ) as serving:
        requests = [
            Request(
                token_ids=prompt,
                sampling_params=SamplingParams(max_new_tokens=3, seed=seed, **params),
            )
            for seed in range(700)
        ]
        replies = [answer.completion.token_ids for answer in serving.generate_outputs(requests)]
        if steps:
            assert serving.stats().counters.accepted_draft_tokens > 100
    order = sorted(prob)
    assert_drawn_from([replies.count(reply) for reply in order], [prob[reply] for reply in order])


def test_a_draft_from_the_same_logits_is_the_sampled_token():
    """Drafts are sampled with the noise of the positions they predict."""
    draw = sampler(200, temperature=1.5)
    logits_NV = torch.randn(200, VOCAB)
    for index in range(3):
        index_N = np.full(200, index)
        drafted = draw.draft(logits_NV, np.arange(200), index_N)
        assert torch.equal(drafted, draw.sample(logits_NV, rows(200, index)).token_N)
