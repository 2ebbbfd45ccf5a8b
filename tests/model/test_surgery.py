import pytest
import torch

from paddock.model.config import IndexerSettings
from paddock.model.surgery import add_indexer, replace_attention, resize_token_embeddings
from tests.model.networks import build_network, grouped_config, latent_config, tokens


@torch.no_grad()
def test_a_window_wider_than_the_text_changes_nothing():
    network = build_network(grouped_config("gqa", "gqa"))
    assert torch.equal(
        replace_attention(network, ("swa", "gqa"), window=100).logits(tokens(30)),
        network.logits(tokens(30)),
    )
    narrow = replace_attention(network, ("swa", "gqa"), window=4)
    assert torch.equal(narrow.logits(tokens(4)), network.logits(tokens(4)))
    assert not torch.equal(narrow.logits(tokens(30)), network.logits(tokens(30)))


@pytest.mark.parametrize("kind", ["gdn", "simple_gdn"])
def test_linear_attention_starts_from_the_grouped_projections(kind):
    network = build_network(grouped_config("gqa", "gqa"))
    changed = replace_attention(network, (kind, "gqa"))
    for name in ("q", "k", "v", "o"):
        old = getattr(network.layers[0].attention, name).weight
        assert torch.equal(getattr(changed.layers[0].attention, name).weight, old)
    assert changed.logits(tokens(30)).isfinite().all()


def test_simple_gdn_adds_no_parameter():
    network = build_network(grouped_config("gqa", "gqa"))
    changed = replace_attention(network, ("simple_gdn", "simple_gdn"))
    assert sum(p.numel() for p in changed.parameters()) == sum(
        p.numel() for p in network.parameters()
    )


@torch.no_grad()
def test_adding_an_indexer_changes_nothing_up_to_topk_keys():
    dense = build_network(
        latent_config(family="glm4_moe_lite", attention=("mla",) * 4, indexer=None)
    )
    indexer = IndexerSettings(heads=2, dim=8, topk=16, layers=("full",) * 4)
    sparse = add_indexer(dense, indexer, seed=3)
    assert sparse.config.family == "glm_moe_dsa"
    assert torch.equal(sparse.logits(tokens(16)), dense.logits(tokens(16)))
    assert not torch.equal(sparse.logits(tokens(40)), dense.logits(tokens(40)))


def test_unsupported_replacements_are_rejected():
    with pytest.raises(ValueError, match="only grouped attention"):
        replace_attention(build_network(latent_config()), ("gqa",) * 4)
    with pytest.raises(ValueError, match="'mla' layers only"):
        add_indexer(build_network(latent_config()), latent_config().indexer)


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_new_tokens_start_as_the_mean_of_their_old_pieces(tied):
    network = build_network(grouped_config("gqa", "gqa", tied=tied))
    larger = resize_token_embeddings(network, {50: (3, 4), 51: (7,), 48: (1, 1, 2)}, stops=(50, 2))
    assert larger.config.vocab == 64  # a multiple of it
    assert larger.config.eos == (50, 2)
    assert (larger.head.weight is larger.embed.weight) == tied
    for name in ("embed", "head"):
        old, new = getattr(network, name).weight, getattr(larger, name).weight
        assert torch.equal(new[:48], old[:48])
        torch.testing.assert_close(new[50], (old[3] + old[4]) / 2)
        assert torch.equal(new[51], old[7])
        torch.testing.assert_close(new[48], (2 * old[1] + old[2]) / 3)  # a spare row is taken
        torch.testing.assert_close(new[63], old.mean(0))
    torch.testing.assert_close(larger.logits([1, 9])[:, :48], network.logits([1, 9])[:, :48])
