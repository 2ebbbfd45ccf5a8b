"""Samples that begin alike: the beginning is computed once, and nothing else changes."""

import numpy as np
import pytest
import torch

from paddock.records import TrainSample
from paddock.train.micro_batch import count_tokens, find_shared_prefixes, iter_micro_batches
from paddock.train.policy import (
    PolicyObjective,
    PolicySample,
    TokenLossOutput,
    compute_logprobs,
    compute_token_logprobs,
    pack_samples,
    replay_routing,
)
from tests.engine.networks import SHARED
from tests.model.networks import VOCAB, born, grouped_config, latent_config

CPU = torch.device("cpu")
KINDS = {
    "sparse": lambda: born(latent_config()).double(),
    "shared choices": lambda: born(latent_config(indexer=SHARED)).double(),
    "dense": lambda: born(latent_config(attention=("mla",) * 4, indexer=None)).double(),
    "grouped": lambda: born(grouped_config("gqa", "swa")).double(),
    "recurrent": lambda: born(grouped_config("gdn", "gqa")).double(),
}


def lesson(number, tokens, prompt, **changes):
    generator = np.random.default_rng(number)
    count = len(tokens)
    said = tuple(-generator.random(count).astype(np.float32).astype(float))
    sample = TrainSample(
        id=f"s{number}/0",
        token_ids=tuple(int(t) for t in tokens),
        logprobs=said,
        loss_mask=tuple(place >= prompt for place in range(count)),
        advantages=tuple(generator.normal(size=count)),
        oldest_version=0,
    )
    return PolicySample(sample=sample, weight=0.1, **changes)


# Of each group the length of its prompt, and of the replies behind it. The longest are beyond what
# attention under a mask is for.
SIZES = ((12, (5, 9, 1, 7)), (30, (20, 3, 11)), (2, (16, 16)), (70, (20, 10)))


def groups(seed=0):
    """And in each one more, which goes on from the first."""
    generator = np.random.default_rng(seed)
    found = []
    for prompt, replies in SIZES:
        begin = generator.integers(0, VOCAB, prompt)
        for length in replies:
            tokens = np.concatenate((begin, generator.integers(0, VOCAB, length)))
            found.append(lesson(len(found), tokens, prompt))
        further = np.concatenate((found[-len(replies)].sample.token_ids, [1, 2, 3]))
        found.append(lesson(len(found), further, len(further) - 2))
    return found


def both_ways(lessons):
    (batch,) = iter_micro_batches(pack_samples(lessons), CPU)
    apart = type(batch)(batch.token_S, batch.loss_mask_S, batch.attn_metadata, batch.columns)
    return batch, apart


def test_what_is_shared_is_found_and_computed_once():
    lessons = groups()
    batch, apart = both_ways(lessons)
    layout = batch.shared_prefixes
    whole = sum(len(each.sample.token_ids) for each in lessons)
    # The prompt for each but the first of a group, and for the last that one's reply as well.
    assert layout.tokens == whole - sum(p * len(replies) + replies[0] for p, replies in SIZES)
    assert torch.equal(batch.token_S[layout.query_T][layout.kv_slot_S], batch.token_S)
    assert torch.equal(layout.position_T[layout.kv_slot_S], apart.attn_metadata.position_T)


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_and_gradients_are_the_same(kind):
    network, lessons = KINDS[kind](), groups()
    found = []
    for batch in both_ways(lessons):
        network.zero_grad()
        logp_T = compute_token_logprobs(network, batch)
        (logp_T * batch.columns["advantages"]).sum().backward()
        found.append(
            [logp_T.detach()] + [p.grad for p in network.parameters() if p.grad is not None]
        )
    once, often = found
    assert len(once) == len(often) > 10
    for a, b in zip(once, often, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_only_the_network_sees_fewer_tokens():
    network = KINDS["sparse"]()
    batch, apart = both_ways(groups())
    seen = []
    network.embed.register_forward_hook(lambda _, __, out: seen.append(len(out)))
    compute_token_logprobs(network, batch)
    compute_token_logprobs(network, apart)
    assert seen == [batch.shared_prefixes.tokens, len(batch.token_S)]
    recurrent = KINDS["recurrent"]()
    recurrent.embed.register_forward_hook(lambda _, __, out: seen.append(len(out)))
    compute_token_logprobs(recurrent, batch)
    assert seen[-1] == len(batch.token_S)


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("alike", [10, 4, 0], ids="{} with the same experts".format)
def test_named_experts_are_followed_and_counted_as_often_as_they_are_met(replay, alike):
    """Engines of two versions may have chosen differently for the same prompt."""
    network, generator = KINDS["sparse"](), np.random.default_rng(3)

    def chosen(count):
        return np.sort(
            np.stack([generator.permutation(6)[:2] for _ in range(count * 3)]).reshape(count, 3, 2)
        ).astype(np.int16)

    begin = generator.integers(0, VOCAB, 10)
    said = chosen(10)
    lessons = []
    for number in range(3):
        tokens = np.concatenate((begin, generator.integers(0, VOCAB, 6)))
        experts = np.concatenate((said[:alike], chosen(16 - alike)))
        lessons.append(lesson(number, tokens, 10, routed_experts_SLK=experts))
    found = []
    shared = both_ways(lessons)[0].shared_prefixes
    assert shared.tokens == 48 - 2 * alike if alike else shared is None
    for batch in both_ways(lessons):
        with replay_routing(network, batch, replay=replay) as apart, torch.no_grad():
            logp_T = compute_token_logprobs(network, batch)
        found.append((logp_T, apart.mean(len(batch.token_S))))
    torch.testing.assert_close(found[0], found[1])


def test_what_is_not_worth_it_is_left_alone():
    tokens = np.arange(40, dtype=np.int32)[:, None]
    assert find_shared_prefixes(tokens, (20, 20), CPU) is None
    assert find_shared_prefixes(np.concatenate((tokens[:1], tokens)), (20, 21), CPU) is None


def test_micro_batches_share_within_themselves_and_the_loss_is_the_same():
    def once(logp):
        return TokenLossOutput(logp.logprob_N * logp.advantage_N, {})

    network, lessons = KINDS["sparse"](), groups()
    whole = pack_samples(lessons)
    scores = [compute_logprobs(network, whole, micro_tokens=tokens) for tokens in (None, 60, 1)]
    for other in scores[1:]:
        np.testing.assert_allclose(scores[0], other, atol=1e-5)
    objective = PolicyObjective(once)
    objective.token_stats.reset(len(lessons))
    for micro in iter_micro_batches(whole, CPU, 60):
        objective(network, micro, count_tokens(whole, 0), 0.0).total.backward()
    assert objective.token_stats.seen.tolist() == [sum(each.sample.loss_mask) for each in lessons]
