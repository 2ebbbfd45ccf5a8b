"""GLM-5 layout: folders are exchanged with transformers in both directions with equal logits."""

import json

import pytest
import torch

from paddock.checkpoint import load_pretrained, save_pretrained
from paddock.model import Transformer
from paddock.model.config import (
    IndexerSettings,
    MLASettings,
    ModelConfig,
    MoESettings,
)
from tests.checkpoint.transformers_models import (
    SPARSE,
    TOLERANCE,
    VOCAB,
    distance,
    load_with_transformers,
    our_logits,
    random_model,
    transformers_logits,
)

FAMILY = "GlmMoeDsa"
# Each name states the difference from the plain network.
NETWORKS = {
    "plain": {},
    "one head": {"num_attention_heads": 1, "num_key_value_heads": 1},
    "six heads, values wider than keys": {
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 22,
    },
    "keys wider than values, index dims all rotated": {
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 6,
        "index_n_heads": 11,
    },
    "top-k beyond the sequence": {"index_topk": 64},
    "top-k of one": {"index_topk": 1},
    "expert groups": {
        "n_routed_experts": 12,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 5,
    },
    "shared indexers, listed": {
        "num_hidden_layers": 5,
        "indexer_types": ["full", "shared", "full", "shared", "shared"],
    },
    "shared indexers, by frequency": {
        "num_hidden_layers": 6,
        "index_topk_freq": 2,
        "index_skip_topk_offset": 3,
    },
    "shared indexers, by pattern": {"index_topk_pattern": "FSF"},
    "no dense layer": {"first_k_dense_replace": 0},
    "dense layers only": {"first_k_dense_replace": 9},
    "a dense layer in the middle": {"mlp_layer_types": ["sparse", "dense", "sparse"]},
    "raw expert weights, two shared experts": {
        "norm_topk_prob": False,
        "n_shared_experts": 2,
        "routed_scaling_factor": 0.7,
    },
    "tied": {"tie_word_embeddings": True},
    "fast rotation": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
}


@pytest.mark.parametrize("name", NETWORKS)
def test_both_ways_the_logits_agree(name, tmp_path):
    theirs = random_model(FAMILY, SPARSE | NETWORKS[name])
    expected = transformers_logits(theirs)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    ours = load_pretrained(tmp_path / "theirs")
    assert distance(our_logits(ours), expected) <= TOLERANCE

    save_pretrained(ours, tmp_path / "ours", shard_bytes=20_000)
    assert len(list((tmp_path / "ours").glob("model-*-of-*.safetensors"))) > 2
    theirs_again, unplaced = load_with_transformers(FAMILY, tmp_path / "ours")
    assert not unplaced
    assert distance(transformers_logits(theirs_again), expected) <= TOLERANCE


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_zero_shared_experts_are_read(tmp_path):
    """transformers still writes them, as empty matrices."""
    theirs = random_model(FAMILY, SPARSE | {"n_shared_experts": 0})
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_pretrained(tmp_path / "theirs")
    assert distance(our_logits(ours), transformers_logits(theirs)) <= TOLERANCE


def test_transformers_reads_a_network_initialised_here(tmp_path):
    config = ModelConfig(
        family="glm_moe_dsa",
        vocab=VOCAB,
        hidden=24,
        context=128,
        attention=("dsa",) * 3,
        mlp=("dense", "moe", "moe"),
        dense_inner=40,
        mla=MLASettings(heads=3, q_rank=16, kv_rank=12, nope=8, rope=6, value=14, norm_eps=1e-6),
        indexer=IndexerSettings(heads=16, dim=10, topk=5, layers=("full", "full", "shared")),
        moe=MoESettings(experts=6, active=2, inner=8, shared=2, groups=3, groups_kept=2),
        eos=(0,),
    )
    ours = Transformer.from_config(config, seed=1)
    generator = torch.Generator().manual_seed(2)
    for name, tensor in ours.state_dict().items():
        if tensor.ndim == 1:
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + name.endswith("weight"))
        else:
            tensor.mul_(10)  # from 0.02, where attention is nearly uniform
    save_pretrained(ours, tmp_path / "ours")
    theirs, unplaced = load_with_transformers(FAMILY, tmp_path / "ours")
    assert not unplaced
    assert theirs.config.eos_token_id == 0
    assert distance(our_logits(ours), transformers_logits(theirs)) <= TOLERANCE


@pytest.fixture(scope="module")
def coarse(tmp_path_factory):
    """A transformers model with a large `rms_norm_eps`, which its latent norms do not use."""
    folder = tmp_path_factory.mktemp("coarse")
    theirs = random_model(FAMILY, SPARSE | {"rms_norm_eps": 0.05})
    theirs.save_pretrained(folder)
    return folder, transformers_logits(theirs)


def test_latent_norms_use_rms_norm_eps_unless_given(coarse):
    folder, expected = coarse
    assert load_pretrained(folder).config.mla.norm_eps == 0.05
    assert distance(our_logits(load_pretrained(folder)), expected) > 1e-3
    loaded = load_pretrained(folder, latent_norm_eps=1e-6)
    assert distance(our_logits(loaded), expected) <= TOLERANCE


def test_config_json_carries_the_epsilon_of_the_latent_norms(coarse, tmp_path):
    loaded = load_pretrained(coarse[0], latent_norm_eps=1e-6)
    save_pretrained(loaded, tmp_path / "loaded")
    written = json.loads((tmp_path / "loaded" / "config.json").read_text())
    assert (written["latent_norm_eps"], written["rms_norm_eps"]) == (1e-6, 0.05)
    again = load_pretrained(tmp_path / "loaded")
    assert again.config == loaded.config
    assert torch.equal(our_logits(again), our_logits(loaded))
