"""Shared prefixes of samples are computed once, with the same losses and gradients."""

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
from tests.model.networks import VOCAB, build_network, grouped_config, latent_config

CPU = torch.device("cpu")
KINDS = {
    "sparse": lambda: build_network(latent_config()).double(),
    "shared indexer": lambda: build_network(latent_config(indexer=SHARED)).double(),
    "dense": lambda: build_network(latent_config(attention=("mla",) * 4, indexer=None)).double(),
    "grouped": lambda: build_network(grouped_config("gqa", "swa")).double(),
    "recurrent": lambda: build_network(grouped_config("gdn", "gqa")).double(),
}


def make_sample(number, tokens, prompt, **changes):
    generator = np.random.default_rng(number)
    count = len(tokens)
    routing = tuple(-generator.random(count).astype(np.float32).astype(float))
    sample = TrainSample(
        id=f"s{number}/0",
        token_ids=tuple(int(t) for t in tokens),
        logprobs=routing,
        loss_mask=tuple(position >= prompt for position in range(count)),
        advantages=tuple(generator.normal(size=count)),
        oldest_version=0,
    )
    return PolicySample(sample=sample, weight=0.1, **changes)


# Per group the length of its prompt and of its replies. The longest exceed what masked attention
# is used for.
SIZES = ((12, (5, 9, 1, 7)), (30, (20, 3, 11)), (2, (16, 16)), (70, (20, 10)))


def groups(seed=0):
    """Samples of all groups; the last of each continues the first."""
    generator = np.random.default_rng(seed)
    found = []
    for prompt, replies in SIZES:
        begin = generator.integers(0, VOCAB, prompt)
        for length in replies:
            tokens = np.concatenate((begin, generator.integers(0, VOCAB, length)))
            found.append(make_sample(len(found), tokens, prompt))
        further = np.concatenate((found[-len(replies)].sample.token_ids, [1, 2, 3]))
        found.append(make_sample(len(found), further, len(further) - 2))
    return found


def with_and_without_sharing(samples):
    (batch,) = iter_micro_batches(pack_samples(samples), CPU)
    separate = type(batch)(batch.token_S, batch.loss_mask_S, batch.attn_metadata, batch.columns)
    return batch, separate


def test_shared_prefixes_are_found_and_computed_once():
    samples = groups()
    batch, separate = with_and_without_sharing(samples)
    layout = batch.shared_prefixes
    whole = sum(len(each.sample.token_ids) for each in samples)
    # Saved: the prompt for each but the first of a group, and the first reply for the last.
    assert layout.tokens == whole - sum(p * len(replies) + replies[0] for p, replies in SIZES)
    assert torch.equal(batch.token_S[layout.query_T][layout.kv_slot_S], batch.token_S)
    assert torch.equal(layout.position_T[layout.kv_slot_S], separate.attn_metadata.position_T)


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_and_gradients_are_the_same(kind):
    network, samples = KINDS[kind](), groups()
    found = []
    for batch in with_and_without_sharing(samples):
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


def test_only_the_network_processes_fewer_tokens():
    network = KINDS["sparse"]()
    batch, separate = with_and_without_sharing(groups())
    seen = []
    network.embed.register_forward_hook(lambda _, __, out: seen.append(len(out)))
    compute_token_logprobs(network, batch)
    compute_token_logprobs(network, separate)
    assert seen == [batch.shared_prefixes.tokens, len(batch.token_S)]
    recurrent = KINDS["recurrent"]()
    recurrent.embed.register_forward_hook(lambda _, __, out: seen.append(len(out)))
    compute_token_logprobs(recurrent, batch)
    assert seen[-1] == len(batch.token_S)


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("shared_routing", [10, 4, 0], ids="{} with the same experts".format)
def test_replayed_routing_is_counted_per_occurrence(replay, shared_routing):
    """Engines of two versions may have routed the same prompt differently."""
    network, generator = KINDS["sparse"](), np.random.default_rng(3)

    def chosen(count):
        return np.sort(
            np.stack([generator.permutation(6)[:2] for _ in range(count * 3)]).reshape(count, 3, 2)
        ).astype(np.int16)

    begin = generator.integers(0, VOCAB, 10)
    routing = chosen(10)
    samples = []
    for number in range(3):
        tokens = np.concatenate((begin, generator.integers(0, VOCAB, 6)))
        experts = np.concatenate((routing[:shared_routing], chosen(16 - shared_routing)))
        samples.append(make_sample(number, tokens, 10, routed_experts_SLK=experts))
    found = []
    shared = with_and_without_sharing(samples)[0].shared_prefixes
    assert shared.tokens == 48 - 2 * shared_routing if shared_routing else shared is None
    for batch in with_and_without_sharing(samples):
        with replay_routing(network, batch, replay=replay) as separate, torch.no_grad():
            logp_T = compute_token_logprobs(network, batch)
        found.append((logp_T, separate.mean(len(batch.token_S))))
    torch.testing.assert_close(found[0], found[1])


def test_short_shared_prefixes_are_not_merged():
    tokens = np.arange(40, dtype=np.int32)[:, None]
    assert find_shared_prefixes(tokens, (20, 20), CPU) is None
    assert find_shared_prefixes(np.concatenate((tokens[:1], tokens)), (20, 21), CPU) is None


def test_micro_batches_share_prefixes_within_themselves_with_the_same_loss():
    def once(logp):
        return TokenLossOutput(logp.logprob_N * logp.advantage_N, {})

    network, samples = KINDS["sparse"](), groups()
    whole = pack_samples(samples)
    scores = [compute_logprobs(network, whole, micro_tokens=tokens) for tokens in (None, 60, 1)]
    for other in scores[1:]:
        np.testing.assert_allclose(scores[0], other, atol=1e-5)
    objective = PolicyObjective(once)
    objective.token_stats.reset(len(samples))
    for micro in iter_micro_batches(whole, CPU, 60):
        objective(network, micro, count_tokens(whole, 0), 0.0).total.backward()
    assert objective.token_stats.seen.tolist() == [sum(each.sample.loss_mask) for each in samples]
