import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paddock.model import AttentionMetadata, AuxRequest
from paddock.quant import rotate
from paddock.quant.rotate import Rotation
from paddock.quant.w4a8 import QuantError
from tests.model.networks import build_network, grouped_config, latent_config, tokens

SHARED = {"heads": 2, "dim": 8, "topk": 8, "layers": ("full", "shared", "full", "shared")}
NO_Q_RANK = {"heads": 4, "q_rank": None, "kv_rank": 16, "nope": 8, "rope": 4, "value": 10}
NETWORKS = {
    "sparse": latent_config(),
    "hidden of 12 times a power of two": latent_config(hidden=96),
    "hidden of no Hadamard size": latent_config(hidden=56),
    "shared indexers": latent_config(indexer=SHARED),
    "dense, no query latent": latent_config(attention=("mla",) * 4, indexer=None, mla=NO_Q_RANK),
    "tied": latent_config(tied=True),
    "grouped": grouped_config("gqa", "swa"),
    "latent and grouped layers": latent_config(
        family="paddock",
        attention=("mla", "gqa", "mla", "swa"),
        indexer=None,
        gqa={"heads": 6, "kv_heads": 3, "dim": 12, "window": 6},
        mtp=None,
    ),
    "grouped with biases": grouped_config(
        "gqa", gqa={"heads": 4, "kv_heads": 2, "dim": 8, "bias": "all", "qk_norm": True}
    ),
}


@given(st.integers(1, 100), st.integers(0, 1000))
def test_a_rotation_is_orthonormal_at_every_size(size, seed):
    turn = Rotation.random(size, torch.Generator().manual_seed(seed))
    matrix = turn.apply(torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64))
    x = torch.randn(3, size, dtype=torch.float64)
    torch.testing.assert_close(turn.inverse(turn.apply(x)), x)


@pytest.mark.parametrize("size", [96, 6144, 2048, 56])
def test_a_rotation_spreads_one_outlier_channel_over_all(size):
    x = torch.zeros(size)
    x[3] = 1000.0
    rotated = Rotation.random(size, torch.Generator().manual_seed(0)).apply(x)
    assert float(rotated.abs().max()) < 1000.0 * 2 * size**-0.5


@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_a_rotated_network_has_the_same_logits(name):
    plain = build_network(NETWORKS[name])
    rotated = rotate(copy.deepcopy(plain), seed=5)
    token_T, layout = tokens(60), AttentionMetadata.packed([40, 20])
    before, after = (
        n(token_T, layout, aux=AuxRequest(routing_and_topk=True)) for n in (plain, rotated)
    )
    torch.testing.assert_close(
        rotated.head(after.hidden_TD), plain.head(before.hidden_TD), atol=1e-4, rtol=0
    )
    for one, other in zip(before.aux, after.aux, strict=True):
        if one.selection is not None:
            assert torch.equal(one.selection.index_QK, other.selection.index_QK)
        if one.experts_TK is not None:
            assert torch.equal(one.experts_TK, other.experts_TK)
    if plain.mtp is None:
        return
    ahead = [
        list(n.mtp_forward(out.hidden_TD, token_T, n.make_context(layout), 3))
        for n, out in ((plain, before), (rotated, after))
    ]
    for (one_TD, _), (other_TD, _) in zip(*ahead, strict=True):
        torch.testing.assert_close(rotated.head(other_TD), plain.head(one_TD), atol=1e-4, rtol=0)


@torch.no_grad()
def test_rotation_changes_every_kind_of_weight():
    """Every weight that must be rotated is, and no rope row is changed."""
    plain = build_network(latent_config())
    rotated = rotate(copy.deepcopy(plain))
    layer, moved = plain.layers[1], rotated.layers[1]
    rank = plain.config.mla.kv_rank
    norm = layer.attention_norm.weight
    # The rope rows of kv_a are rotated by position: only their input side is rotated here.
    rows = layer.attention.kv_a.weight[rank:] * norm
    gram = rows @ rows.T
    found = moved.attention.kv_a.weight[rank:]
    torch.testing.assert_close(found @ found.T, gram)
    assert torch.equal(rotated.mtp.join.weight, plain.mtp.join.weight)
    for name in ("q_a", "kv_a", "kv_b", "o", "q_b", "indexer.query", "indexer.key"):
        one = layer.attention.get_submodule(name).weight
        assert not torch.allclose(one, moved.attention.get_submodule(name).weight, atol=1e-3), name


def test_the_same_seed_gives_the_same_rotation():
    one, other, third = (
        rotate(build_network(latent_config()), seed).embed.weight for seed in (0, 0, 1)
    )
    assert torch.equal(one, other)
    assert not torch.equal(one, third)


@torch.no_grad()
def test_a_zeroed_channel_keeps_the_trunk_exact_and_drafts_finite():
    plain = build_network(latent_config())
    plain.norm.weight[3] = 0.0
    rotated = rotate(copy.deepcopy(plain))
    token_T, layout = tokens(30), AttentionMetadata.packed([30])
    out = rotated(token_T, layout)
    torch.testing.assert_close(
        rotated.head(out.hidden_TD), plain.logits(token_T), atol=1e-4, rtol=0
    )
    ((state_TD, _),) = rotated.mtp_forward(out.hidden_TD, token_T, rotated.make_context(layout), 1)
    assert state_TD.isfinite().all()


def test_recurrent_layers_are_rejected():
    with pytest.raises(QuantError, match="'gdn' layers cannot be rotated"):
        rotate(build_network(grouped_config("gdn")))
