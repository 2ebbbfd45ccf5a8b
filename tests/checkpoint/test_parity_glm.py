"""The released layout of GLM-5: what transformers saves we read, what we save transformers reads,
and both compute the same logits."""

import json

import pytest

from paddock.checkpoint import load_pretrained, save_pretrained
from tests.checkpoint.peers import (
    EXPERTS,
    INDEX,
    TOLERANCE,
    distance,
    our_logits,
    peer,
    read_by_them,
    their_logits,
    tokens,
)

FAMILY = "GlmMoeDsa"
# Every entry differs from the plain network in what its name says.
NETWORKS = {
    "plain": {},
    "one head": {"num_attention_heads": 1, "num_key_value_heads": 1},
    "many heads, values wider than keys": {
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
        "index_head_dim": 16,
        "index_n_heads": 11,
    },
    "top-k beyond the sequence": {"index_topk": 64},
    "top-k of one": {"index_topk": 1, "index_n_heads": 16},
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
    "dense layers in the middle": {"mlp_layer_types": ["sparse", "dense", "sparse"]},
    "raw expert weights, two shared experts": {
        "norm_topk_prob": False,
        "n_shared_experts": 2,
        "routed_scaling_factor": 0.7,
    },
    "tied": {"tie_word_embeddings": True},
    "other rotation": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
}


@pytest.mark.parametrize("name", NETWORKS)
def test_both_ways_the_logits_agree(name, tmp_path):
    theirs = peer(FAMILY, **(EXPERTS | INDEX | NETWORKS[name]))
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    expected = their_logits(theirs, tokens())
    ours = load_pretrained(tmp_path / "theirs")
    d1 = distance(our_logits(ours, tokens()), expected)
    save_pretrained(ours, tmp_path / "ours", shard_bytes=20_000)
    back = read_by_them(FAMILY, tmp_path / "ours")
    d2 = distance(their_logits(back, tokens()), expected)
    print(name, d1, d2)
    assert d1 <= TOLERANCE
    assert d2 <= TOLERANCE
