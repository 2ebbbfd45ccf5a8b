"""Saving and loading is bitwise exact."""

import json

import pytest
import torch
from safetensors.torch import load_file

from paddock.checkpoint import CheckpointError, load_pretrained, read_config, save_pretrained
from paddock.checkpoint.config_json import config_from_json, config_to_json
from paddock.model import PRESETS, Transformer
from paddock.model.config import GQASettings, IndexerSettings, RopeSettings, WeightInitSettings
from tests.model.networks import build_network, grouped_config, latent_config

NETWORKS = {
    "glm_moe_dsa": latent_config(),
    "glm_moe_dsa, tied": latent_config(tied=True),
    "deepseek_v3": latent_config(family="deepseek_v3", attention=("mla",) * 4, indexer=None),
    "llama": grouped_config(
        "gqa", "gqa", family="llama", gqa=GQASettings(heads=4, kv_heads=2, dim=8)
    ),
    "every ablation": grouped_config("gqa", "swa", "gdn", "simple_gdn"),
    "every ablation, tied, with biases": grouped_config(
        "gqa",
        "swa",
        "gdn",
        "simple_gdn",
        tied=True,
        gqa=GQASettings(heads=4, kv_heads=2, dim=8, window=3, bias="all", qk_norm=True, conv=2),
    ),
    "our own layout of a latent network": latent_config(family="paddock"),
}
WIDE = ("router.bias", "indexer.weights.weight")


def tensors_of(folder):
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def assert_same(one: Transformer, other: Transformer):
    assert one.config == other.config
    before, after = one.state_dict(), other.state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        assert torch.equal(tensor, after[name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_round_trips_bitwise(name, dtype, tmp_path):
    network = build_network(NETWORKS[name]).cast(getattr(torch, dtype))
    save_pretrained(network, tmp_path / "saved", shard_bytes=10_000)
    again = load_pretrained(tmp_path / "saved", dtype)
    assert_same(network, again)
    assert not again.training


def test_tied_weights_are_one_tensor_after_loading(tmp_path):
    save_pretrained(build_network(latent_config(tied=True)), tmp_path / "tied")
    again = load_pretrained(tmp_path / "tied", "bfloat16")
    assert again.head.weight is again.embed.weight
    assert "lm_head.weight" not in tensors_of(tmp_path / "tied")


def test_routers_and_index_weights_stay_float32_in_bfloat16(tmp_path):
    network = build_network(latent_config())
    save_pretrained(network, tmp_path / "narrow", dtype="bfloat16")
    stored = {name: tensor.dtype for name, tensor in tensors_of(tmp_path / "narrow").items()}
    wide = {name for name, dtype in stored.items() if dtype == torch.float32}
    # Four layers and MTP have an indexer, three layers and MTP a router.
    assert len(wide) == 5 + 4
    assert all(
        name.endswith(("indexer.weights_proj.weight", "e_score_correction_bias")) for name in wide
    )
    assert set(stored.values()) == {torch.float32, torch.bfloat16}

    again = load_pretrained(tmp_path / "narrow", "bfloat16")
    for name, tensor in again.state_dict().items():
        assert (tensor.dtype == torch.float32) == name.endswith(WIDE), name
        if name.endswith(WIDE):
            assert torch.equal(tensor, network.state_dict()[name]), name


def test_saving_in_bfloat16_rounds_and_leaves_the_network_alone(tmp_path):
    network = build_network(latent_config())
    untouched = build_network(latent_config())
    save_pretrained(network, tmp_path / "narrow", dtype=torch.bfloat16)
    assert_same(network, untouched)
    assert json.loads((tmp_path / "narrow" / "config.json").read_text())["dtype"] == "bfloat16"
    again = load_pretrained(tmp_path / "narrow")
    expected = untouched.cast(torch.bfloat16).cast(torch.float32)
    assert_same(expected, again)


def test_saving_in_float32_what_was_bfloat16_loses_nothing(tmp_path):
    network = build_network(latent_config()).cast(torch.bfloat16)
    save_pretrained(network, tmp_path / "wide", dtype="float32")
    assert_same(load_pretrained(tmp_path / "wide", "bfloat16"), network)


@pytest.mark.parametrize("shard_bytes", [1, 10_000, 10**9])
def test_shards_keep_to_their_limit_and_hold_every_tensor(shard_bytes, tmp_path):
    network = build_network(latent_config())
    save_pretrained(network, tmp_path / "saved", shard_bytes=shard_bytes)
    files = sorted((tmp_path / "saved").glob("*.safetensors"))
    shards = [load_file(file) for file in files]
    assert all(
        len(shard) == 1 or sum(t.nbytes for t in shard.values()) <= shard_bytes for shard in shards
    )
    index = tmp_path / "saved" / "model.safetensors.index.json"
    assert index.exists() == (len(files) > 1)
    if index.exists():
        written = json.loads(index.read_text())
        homes = {
            name: file.name for file, shard in zip(files, shards, strict=True) for name in shard
        }
        assert written["weight_map"] == homes
        total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
        assert written["metadata"]["total_size"] == total
    assert_same(load_pretrained(tmp_path / "saved"), network)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_round_trips_through_config_json(name):
    config = PRESETS[name]
    again = config_from_json(json.loads(json.dumps(config_to_json(config))))
    assert again.model_copy(update={"init": config.init}) == config


def test_init_settings_are_only_kept_in_our_own_layout():
    odd = WeightInitSettings(std=0.3, head_std=0.01)
    own = grouped_config("gdn", init=odd)
    assert config_from_json(config_to_json(own)).init == odd
    released = latent_config(init=odd)
    assert config_from_json(config_to_json(released)).init == WeightInitSettings(std=0.3)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (grouped_config("gqa", "swa", family="llama"), "attention"),
        (grouped_config("gdn", family="qwen3"), "layer_types"),
        (grouped_config("gqa", family="qwen2"), "gqa"),
        (latent_config(attention=("dsa", "mla", "dsa", "dsa")), "attention"),
        (latent_config(rope=RopeSettings(layout="halves")), "rope"),
        (
            latent_config(
                indexer=IndexerSettings(
                    heads=2, dim=8, topk=8, layers=("full",) * 4, rope_layout="halves"
                )
            ),
            "indexer",
        ),
        (
            latent_config(
                family="deepseek_v3",
                attention=("mla",) * 4,
                indexer=None,
                mlp=("moe", "dense", "moe", "moe"),
            ),
            "mlp",
        ),
        (latent_config(family="qwen2"), "gqa"),
        (grouped_config("gqa", family="glm_moe_dsa"), "mla"),
    ],
)
def test_a_network_that_a_released_layout_cannot_express_is_not_saved(config, field, tmp_path):
    with pytest.raises(CheckpointError, match=field):
        save_pretrained(build_network(config), tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_the_config_can_be_loaded_alone(tmp_path):
    network = build_network(latent_config())
    save_pretrained(network, tmp_path / "saved")
    (tmp_path / "saved" / "model.safetensors").unlink()
    assert read_config(tmp_path / "saved") == network.config
