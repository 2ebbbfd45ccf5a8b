"""Other families: folders are exchanged with transformers in both directions with equal logits."""

import pytest
import torch

from paddock.checkpoint import load_pretrained, save_pretrained
from tests.checkpoint.transformers_models import (
    DENSE,
    LATENT,
    TOLERANCE,
    distance,
    load_with_transformers,
    our_logits,
    random_model,
    transformers_logits,
)

YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
    "beta_slow": 1.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 5}
GROUPED = DENSE | {"num_attention_heads": 6, "num_key_value_heads": 2}
QWEN2 = GROUPED | {"hidden_size": 36}  # its heads have hidden / heads dims
QWEN3 = GROUPED | {"head_dim": 10}

NETWORKS = {
    ("Glm4MoeLite", "plain"): LATENT,
    ("Glm4MoeLite", "halves, no query latent, two shared experts"): LATENT
    | {"q_lora_rank": None, "rope_interleave": False, "n_shared_experts": 2},
    ("Glm4MoeLite", "sparse layers first, tied"): LATENT
    | {"mlp_layer_types": ["sparse", "dense", "sparse"], "tie_word_embeddings": True},
    ("DeepseekV3", "plain"): LATENT,
    ("DeepseekV3", "no query latent, expert groups"): LATENT
    | {
        "q_lora_rank": None,
        "n_routed_experts": 16,
        "n_group": 4,
        "topk_group": 3,
        "first_k_dense_replace": 0,
    },
    ("DeepseekV3", "yarn"): LATENT | {"rope_parameters": YARN},
    ("DeepseekV3", "yarn with DeepSeek's magnitudes, halves"): LATENT
    | {
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
        "rope_interleave": False,
    },
    ("Llama", "grouped heads"): DENSE | {"num_attention_heads": 8, "num_key_value_heads": 2},
    ("Llama", "llama3 stretching, wide heads"): DENSE | {"rope_parameters": LLAMA3, "head_dim": 12},
    ("Llama", "linear stretching, biases, tied"): DENSE
    | {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    ("Qwen2", "plain"): QWEN2,
    ("Qwen2", "a window in the last two layers, tied"): QWEN2
    | WINDOW
    | {"max_window_layers": 1, "tie_word_embeddings": True},
    ("Qwen2", "yarn"): QWEN2 | {"rope_parameters": YARN | {"truncate": False}},
    ("Qwen3", "plain"): QWEN3,
    ("Qwen3", "windows as listed, biases"): QWEN3
    | WINDOW
    | {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "attention_bias": True,
    },
}


@pytest.mark.parametrize(("family", "name"), NETWORKS)
def test_both_ways_the_logits_agree(family, name, tmp_path):
    theirs = random_model(family, NETWORKS[family, name])
    expected = transformers_logits(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_pretrained(tmp_path / "theirs")
    assert distance(our_logits(ours), expected) <= TOLERANCE

    save_pretrained(ours, tmp_path / "ours")
    theirs_again, unplaced = load_with_transformers(family, tmp_path / "ours")
    assert not unplaced
    assert distance(transformers_logits(theirs_again), expected) <= TOLERANCE


@pytest.mark.parametrize("family", ["Glm4MoeLite", "DeepseekV3"])
def test_the_epsilon_of_latent_norms_can_be_given(family, tmp_path):
    theirs = random_model(family, LATENT | {"rms_norm_eps": 0.05})
    theirs.save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path, latent_norm_eps=1e-6)
    assert distance(our_logits(loaded), transformers_logits(theirs)) <= TOLERANCE
    assert distance(our_logits(load_pretrained(tmp_path)), transformers_logits(theirs)) > 1e-3


def test_latent_norm_eps_has_no_effect_on_other_attention(tmp_path):
    theirs = random_model("Llama", DENSE)
    theirs.save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path, latent_norm_eps=0.1)
    assert torch.equal(our_logits(loaded), our_logits(load_pretrained(tmp_path)))
