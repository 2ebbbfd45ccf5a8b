"""Captured routing (experts and selected keys) matches a trainer's forward pass."""

import numpy as np
import pytest
import torch

from paddock.model import AttentionMetadata, AuxRequest
from tests.engine.networks import engine, greedy, network, prompts

PROMPTS = prompts(10, seed=3)


@torch.no_grad()
def chosen(net, token_ids):
    """Experts and selected keys of one forward pass over the whole sequence."""
    output = net(
        torch.tensor(token_ids),
        AttentionMetadata.packed([len(token_ids)]),
        aux=AuxRequest(routing_and_topk=True),
    )
    experts, kept = [], []
    for note in output.aux:
        if note.experts_TK is not None:
            experts.append(note.experts_TK.numpy())
    indexer = net.config.indexer
    for layer, note in enumerate(output.aux):
        if not net.config.has_indexer(layer):
            continue
        rows = np.full((len(token_ids), indexer.topk), -1)
        for t in range(len(token_ids)):
            rows[t, : min(t + 1, indexer.topk)] = np.arange(min(t + 1, indexer.topk))
        rows[note.selection.query_Q.numpy()] = note.selection.index_QK.numpy()
        kept.append(rows)
    return np.stack(experts, 1), np.stack(kept, 1)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("sparse", {}),
        ("shared", {"max_prefill_tokens": 9}),
        ("counting", {"num_speculative_tokens": 3}),
        ("sparse", {"num_pages": 40, "context_length": 64}),
    ],
)
def test_captured_routing_matches_a_forward_pass(kind, settings):
    net = network(kind)
    with engine(net, capture_routing=True, **settings) as serving:
        for _ in range(2):  # the second time from the prefix cache
            requests = [greedy(prompt, 12, return_routing=True) for prompt in PROMPTS]
            for prompt, answer in zip(PROMPTS, serving.generate_outputs(requests), strict=True):
                expert_TLK, index_TLK = chosen(net, prompt + answer.completion.token_ids)
                assert len(answer.routing.expert_TLK) == len(prompt) + 12 - 1
                np.testing.assert_array_equal(answer.routing.expert_TLK, expert_TLK[:-1])
                np.testing.assert_array_equal(answer.routing.index_TLK, index_TLK[:-1])
        assert "num_pages" in settings or serving.stats().prefix_cache_hit_tokens > 0


def test_routing_is_returned_only_on_request():
    with engine(network("sparse")) as serving:
        assert serving.generate_output(greedy((1, 2, 3))).routing is None
