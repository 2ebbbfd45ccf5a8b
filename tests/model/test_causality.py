"""Later tokens never change earlier logits, bitwise."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paddock.model import preset
from tests.model.networks import VOCAB, build_network, grouped_config, latent_config, tokens

NETWORKS = {
    # Two index heads: where both are negative the score is exactly zero, so there are many ties.
    "sparse, two index heads": build_network(latent_config()),
    "sparse, grouped experts": build_network(
        latent_config(
            moe={
                "experts": 8,
                "active": 2,
                "inner": 16,
                "groups": 4,
                "groups_kept": 2,
            }
        )
    ),
    "nano": build_network(preset("nano")),
    "grouped": build_network(grouped_config("gqa", "swa", "gdn", "simple_gdn")),
}


@pytest.mark.parametrize("name", NETWORKS)
@settings(max_examples=20)
@given(kept=st.integers(1, 99), seed=st.integers(0, 99))
@torch.no_grad()
def test_later_tokens_never_change_earlier_logits(name, kept, seed):
    first = tokens(100, seed)
    second = torch.cat((first[:kept], tokens(100 - kept, seed + 1000)))
    network = NETWORKS[name]
    assert torch.equal(network.logits(first)[:kept], network.logits(second)[:kept])


@torch.no_grad()
def test_exact_ties_occur():
    network, token_T = NETWORKS["sparse, two index heads"], tokens(100)
    attention = network.layers[0].attention
    step = network.make_context(layout_of(token_T))
    x_TD = network.layers[0].attention_norm(network.embed(token_T))
    index = attention.index_inputs(x_TD, attention.project(x_TD, step), step)
    match = torch.einsum("thd,sd->ths", index.query_THD, index.key_SD).relu()
    assert (match.sum(1) == 0).float().mean() > 0.05


def layout_of(token_T: torch.Tensor):
    from paddock.model import AttentionMetadata

    return AttentionMetadata.packed([len(token_T)])


def test_ids_outside_the_vocabulary_are_rejected():
    with pytest.raises(ValueError, match=rf"token ids must lie in \[0, {VOCAB}\)"):
        NETWORKS["grouped"].logits([1, VOCAB])
    with pytest.raises(ValueError, match="one non-empty sequence"):
        NETWORKS["grouped"].logits([])
