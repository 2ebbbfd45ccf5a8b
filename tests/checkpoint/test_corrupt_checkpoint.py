"""A corrupt or foreign folder is rejected with one error that names the problem."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from paddock.checkpoint import CheckpointError, load_pretrained, save_pretrained
from tests.model.networks import build_network, latent_config

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NORM = "model.layers.1.input_layernorm.weight"
EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """One network in one file, and in several."""
    home = tmp_path_factory.mktemp("originals")
    save_pretrained(build_network(latent_config()), home / "single")
    save_pretrained(build_network(latent_config()), home / "sharded", shard_bytes=100_000)
    return home


@pytest.fixture
def single(originals, tmp_path):
    return shutil.copytree(originals / "single", tmp_path / "single")


@pytest.fixture
def sharded(originals, tmp_path):
    return shutil.copytree(originals / "sharded", tmp_path / "sharded")


def change_tensors(folder, change):
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def change_map(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def assert_rejected(folder, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        load_pretrained(folder)


def test_the_originals_load(single, sharded):
    one, other = load_pretrained(single), load_pretrained(sharded)
    assert torch.equal(one.logits([1, 2, 3]), other.logits([1, 2, 3]))
    assert len(list(sharded.glob("*.safetensors"))) > 2


@pytest.mark.parametrize("name", [NORM, EXPERT, "lm_head.weight"])
def test_a_missing_tensor_is_named(single, name):
    change_tensors(single, lambda tensors: tensors.pop(name))
    assert_rejected(single, rf"tensor '{name}' is missing$")


def test_of_many_missing_tensors_one_is_named_and_all_are_counted(single):
    change_tensors(single, lambda tensors: [tensors.pop(name) for name in (NORM, EXPERT)])
    assert_rejected(single, rf"tensor '{NORM}' is missing \(and 1 more\)$")


def test_an_extra_tensor_is_named(single):
    name = "model.layers.0.self_attn.q_a_proj.bias"
    change_tensors(single, lambda tensors: tensors.update({name: torch.zeros(24)}))
    assert_rejected(single, rf"unexpected tensor '{name}'$")


def test_stored_rotary_frequencies_are_ignored(single):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(single, lambda tensors: tensors.update({name: torch.zeros(2)}))
    load_pretrained(single)


@pytest.mark.parametrize("shape", [(33,), (1, 32), ()])
def test_a_mis_shaped_tensor_is_named_with_both_shapes(single, shape):
    change_tensors(single, lambda tensors: tensors.update({NORM: torch.zeros(shape)}))
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(single)
    assert f"tensor '{NORM}' has shape {shape}, expected (32,)" in str(caught.value)


def test_a_transposed_expert_is_rejected(single):
    change_tensors(
        single, lambda tensors: tensors.update({EXPERT: tensors[EXPERT].mT.contiguous()})
    )
    assert_rejected(single, rf"tensor '{EXPERT}' has shape \(32, 16\), expected \(16, 32\)")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("value", "word"), [(float("nan"), "nan"), (float("-inf"), "-inf")])
def test_a_nan_is_named_with_its_position(single, value, word, dtype):
    def spoil(tensors):
        tensors[EXPERT] = tensors[EXPERT].to(dtype)
        tensors[EXPERT][5, 7] = value

    change_tensors(single, spoil)
    assert_rejected(single, rf"tensor '{EXPERT}' holds {word} at \(5, 7\)$")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.uint8, torch.bool])
def test_weights_that_are_not_floating_point_are_rejected(single, dtype):
    change_tensors(single, lambda t: t.update({EXPERT: torch.ones(16, 32, dtype=dtype)}))
    assert_rejected(single, rf"tensor '{EXPERT}' is {dtype}")


def test_float16_weights_are_read(single):
    change_tensors(single, lambda tensors: tensors.update({EXPERT: tensors[EXPERT].half()}))
    load_pretrained(single)


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 1000, -1000, -1])
def test_a_truncated_file_is_named(single, cut):
    whole = (single / SINGLE).read_bytes()
    (single / SINGLE).write_bytes(whole[:cut])
    assert_rejected(single, rf"{SINGLE}: truncated or not a safetensors file")


def test_a_file_with_trailing_bytes_is_rejected(single):
    with (single / SINGLE).open("ab") as file:
        file.write(b"more")
    assert_rejected(single, rf"{SINGLE}: truncated or not a safetensors file")


@pytest.mark.parametrize(
    "content",
    [b"\xff" * 64, (2**40).to_bytes(8, "little") + b"{}", b"PK\x03\x04" + b"\0" * 60],
    ids=["noise", "endless header", "zip"],
)
def test_a_file_of_another_kind_is_named(single, content):
    (single / SINGLE).write_bytes(content)
    assert_rejected(single, rf"{SINGLE}: truncated or not a safetensors file")


def test_a_truncated_shard_is_named(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    assert_rejected(sharded, rf"{shard.name}: truncated")


def test_a_missing_shard_is_named(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    assert_rejected(sharded, rf"{INDEX} names {shard.name}, which is missing")


@pytest.mark.parametrize(
    "path", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", ""]
)
def test_an_index_that_points_outside_its_folder_is_rejected(sharded, path):
    change_map(sharded, lambda weight_map: weight_map.update({NORM: path}))
    assert_rejected(sharded, rf"{INDEX} names a file outside its folder: {path}$")


@pytest.mark.parametrize("path", ["x.safetensors", "a\0b"])
def test_an_index_that_points_at_a_missing_file_is_rejected(sharded, path):
    change_map(sharded, lambda weight_map: weight_map.update({NORM: path}))
    assert_rejected(sharded, rf"{INDEX} names {path}, which is missing")


def test_an_index_that_points_at_the_wrong_shard_is_rejected(sharded):
    shards = sorted(file.name for file in sharded.glob("*.safetensors"))

    def move(weight_map):
        weight_map[NORM] = next(name for name in shards if name != weight_map[NORM])

    change_map(sharded, move)
    assert_rejected(sharded, rf"{INDEX} maps tensor '{NORM}' to .*, which does not hold it")


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_without_a_map_is_rejected(sharded, content):
    (sharded / INDEX).write_text(content)
    assert_rejected(sharded, rf"{INDEX}: 'weight_map' is missing or malformed")


def test_an_index_that_is_not_json_is_rejected(sharded):
    (sharded / INDEX).write_text('{"weight_map": {')
    assert_rejected(sharded, rf"{INDEX}: not valid JSON")


def test_a_tensor_in_two_shards_is_named_with_both(sharded):
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor}, second)
    assert_rejected(sharded, rf"'{name}' is in both {first.name} and {second.name}")


def test_shards_next_to_a_single_file_are_ambiguous(single, sharded):
    shutil.copy(single / SINGLE, sharded / SINGLE)
    assert_rejected(sharded, rf"holds {SINGLE}, but {INDEX} does not list it")


def test_pickled_weights_are_not_read(single):
    (single / SINGLE).unlink()
    (single / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    assert_rejected(single, r"only pickled weights \(pytorch_model.bin\)")


def test_a_folder_without_weights_is_rejected(single):
    (single / SINGLE).unlink()
    assert_rejected(single, rf"neither {SINGLE} nor {INDEX} found")


def test_a_missing_folder_and_a_file_have_different_errors(single):
    assert_rejected(single / "nowhere", r"nowhere: folder not found$")
    assert_rejected(single / SINGLE, rf"{SINGLE}: is a file, not a folder$")


def test_weights_of_another_network_are_rejected(single):
    config = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps(config | {"n_routed_experts": 8}))
    assert_rejected(single, r"tensor 'model.layers.1.mlp.experts.6.down_proj.weight' is missing")
    (single / "config.json").write_text(json.dumps(config | {"v_head_dim": 12}))
    assert_rejected(single, r"kv_b_proj.weight' has shape \(72, 16\), expected \(80, 16\)")


@pytest.mark.parametrize("dtype", ["fp32", "torch.float32", "int8", torch.int64, torch.float16])
def test_an_unknown_dtype_is_not_a_checkpoint_error(single, dtype, tmp_path):
    with pytest.raises(ValueError, match="dtype must be one of") as caught:
        load_pretrained(single, dtype)
    assert not isinstance(caught.value, CheckpointError)
    with pytest.raises(ValueError, match="must be one of float32, bfloat16, float64"):
        save_pretrained(build_network(latent_config()), tmp_path / "unsaved", dtype=dtype)
    assert not (tmp_path / "unsaved").exists()
