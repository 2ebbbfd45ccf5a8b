"""Errors: what cannot be quantized, saved, resumed or read is rejected with the reason."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from paddock.checkpoint import CheckpointError, load_pretrained, save_pretrained
from paddock.checkpoint.load import open_checkpoint
from paddock.checkpoint.weight_sync import iter_released_tensors
from paddock.quant import RECIPES, CalibrationText, quantize_folder, rotate
from paddock.quant.w4a8 import QuantError
from tests.model.networks import build_network, grouped_config
from tests.quant.tiny import QUICK, network, text


def test_a_quantized_source_is_rejected(target, tmp_path):
    with pytest.raises(QuantError, match="already quantized"):
        quantize_folder(target, tmp_path / "again", RECIPES["rtn"])
    with pytest.raises(CheckpointError, match="holds integers"):
        open_checkpoint(target)


def test_a_quantized_network_is_not_saved_as_a_float_checkpoint(target, tmp_path):
    with pytest.raises(CheckpointError, match="quantized or rotated network cannot be saved"):
        save_pretrained(load_pretrained(target), tmp_path / "out")
    with pytest.raises(CheckpointError, match="quantized or rotated network cannot be saved"):
        save_pretrained(rotate(network()), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_weight_updates_exclude_quantized_tensors(source, target):
    """Weight synchronisation sees the floating-point tensors only, not the integers."""
    names = set(dict(iter_released_tensors(load_pretrained(target))))
    assert "model.embed_tokens.weight" in names
    assert not any(".experts." in name for name in names if "layers.4" not in name)


def test_smoothing_needs_calibration_text(source, tmp_path):
    with pytest.raises(QuantError, match="needs calibration text"):
        quantize_folder(source, tmp_path / "q", QUICK, passages=text(calibrate=0))
    assert not list(tmp_path.iterdir())


def test_text_of_another_vocabulary_is_rejected(source, tmp_path):
    strange = [p.__class__(ids=(*p.ids, 50), purpose=p.purpose) for p in text()]
    with pytest.raises(QuantError, match=r"must be in \[0, 50\)"):
        quantize_folder(source, tmp_path / "q", QUICK, passages=strange)


def test_indivisible_shapes_are_rejected_before_any_work(source, tmp_path):
    odd = RECIPES["rtn"].model_copy(update={"expert_group_size": 12})
    with pytest.raises(QuantError, match="32 columns do not divide into groups of 12"):
        quantize_folder(source, tmp_path / "q", odd)
    assert not list(tmp_path.iterdir())


def test_odd_columns_cannot_be_packed(tmp_path):
    narrow = {"experts": 6, "active": 2, "inner": 15}
    save_pretrained(network(moe=narrow), tmp_path / "odd")
    with pytest.raises(QuantError, match="'down' has 15 columns; int4 needs an even number"):
        quantize_folder(tmp_path / "odd", tmp_path / "q", RECIPES["rtn"])
    wide = RECIPES["rtn"].model_copy(update={"expert_bits": 8})
    quantize_folder(tmp_path / "odd", tmp_path / "q", wide)
    assert load_pretrained(tmp_path / "q").layers[1].mlp.experts.down.shape[-1] == 15


def test_layers_that_cannot_be_smoothed_are_rejected_before_any_work(tmp_path):
    save_pretrained(build_network(grouped_config("gdn", "gqa")), tmp_path / "recurrent")
    still = QUICK.model_copy(update={"rotate": False})
    with pytest.raises(QuantError, match="'gdn' layers cannot be smoothed"):
        quantize_folder(tmp_path / "recurrent", tmp_path / "q", still, passages=text())
    assert [path.name for path in tmp_path.iterdir()] == ["recurrent"]
    plain = still.model_copy(update={"smooth": False})
    quantize_folder(tmp_path / "recurrent", tmp_path / "q", plain, passages=text())


@pytest.mark.parametrize("bits", [4, 8])
def test_stacked_experts_are_rejected_before_any_work(bits, tmp_path):
    save_pretrained(network(family="paddock"), tmp_path / "own")
    recipe = RECIPES["rtn"].model_copy(update={"expert_bits": bits})
    with pytest.raises(QuantError, match="experts as one tensor"):
        quantize_folder(tmp_path / "own", tmp_path / "q", recipe)
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def changed(source, folder, change):
    """A copy of a checkpoint with other weights."""
    shutil.copytree(source, folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t["model.layers.2.mlp.experts.1.up_proj.weight"].fill_(float("nan")),
            "holds nan",
        ),
        (lambda t: t["model.layers.4.eh_proj.weight"].fill_(float("nan")), "eh_proj.*holds nan"),
        (lambda t: t.pop("model.layers.2.self_attn.o_proj.weight"), "o_proj.weight"),
        (
            lambda t: t.update({"model.layers.2.self_attn.o_proj.weight": torch.zeros(3, 3)}),
            r"o_proj.weight.*shape \(3, 3\)",
        ),
    ],
)
def test_a_corrupt_source_is_named(source, tmp_path, change, message):
    folder = changed(source, tmp_path / "bad", change)
    with pytest.raises(CheckpointError, match=message):
        quantize_folder(folder, tmp_path / "q", RECIPES["rtn"])
    assert not (tmp_path / "q").exists()


def test_an_existing_target_is_rejected(source, tmp_path):
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "mine").write_text("")
    (tmp_path / "file").write_text("")
    for there in ("q", "file"):
        with pytest.raises(QuantError, match="already exists; choose a new folder"):
            quantize_folder(source, tmp_path / there, RECIPES["rtn"])
    with pytest.raises(QuantError, match="source and target are the same"):
        quantize_folder(source, source, RECIPES["rtn"])


def test_an_empty_folder_is_a_valid_target(source, tmp_path, monkeypatch):
    for name in ("meant", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "meant")
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    monkeypatch.chdir(tmp_path / "here")
    for called, meant in (
        (tmp_path / "link", "meant"),
        (tmp_path / "dangling", "new"),
        (".", "here"),
    ):
        quantize_folder(source, called, RECIPES["rtn"])
        assert load_pretrained(tmp_path / meant).config.layers == 4
    assert not list(tmp_path.rglob("*.quantizing"))


def test_resuming_with_other_settings_is_rejected(source, tmp_path):
    def kill(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_folder(source, tmp_path / "q", QUICK, passages=text(), on_progress=kill)
    with pytest.raises(QuantError, match="started with a different 'settings'"):
        quantize_folder(source, tmp_path / "q", RECIPES["rtn"], passages=text())
    with pytest.raises(QuantError, match="started with a different 'text'"):
        quantize_folder(source, tmp_path / "q", QUICK, passages=text(calibrate=3))


def test_results_of_other_settings_or_text_are_not_replaced(source, target):
    before = {file.name: file.stat().st_mtime_ns for file in target.iterdir()}
    with pytest.raises(QuantError, match="already exists, made with other settings"):
        quantize_folder(source, target, RECIPES["rtn"])
    with pytest.raises(QuantError, match="already exists, made with other text"):
        quantize_folder(source, target, QUICK, passages=text(calibrate=3))
    assert {file.name: file.stat().st_mtime_ns for file in target.iterdir()} == before


def test_concurrent_runs_do_not_corrupt_each_other(source, tmp_path):
    def second(_):
        quantize_folder(source, tmp_path / "q", RECIPES["rtn"])

    with pytest.raises(QuantError, match="in use by another process"):
        quantize_folder(source, tmp_path / "q", RECIPES["rtn"], on_progress=second)


def test_an_answer_must_be_within_its_text():
    with pytest.raises(QuantError, match="got start 3, stop 5"):
        CalibrationText(ids=(1, 2, 3, 4), purpose="needles", answers=((3, 5),))
    with pytest.raises(QuantError, match="got start 0, stop 1"):
        CalibrationText(ids=(1, 2, 3, 4), purpose="needles", answers=((0, 1),))


def damaged(target, folder, change):
    """A copy with one shard changed."""
    shutil.copytree(target, folder)
    file = sorted(folder.glob("*.safetensors"))[2]
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.q_a_proj.weight"), "maps tensor"),
        (
            lambda t: t["model.layers.1.self_attn.q_a_proj.weight_scale"].zero_(),
            "not a positive",
        ),
        (
            lambda t: t.update(
                {"model.layers.1.self_attn.q_a_proj.weight": torch.zeros(3, 3).char()}
            ),
            r"has shape \(3, 3\), expected \(24, 32\)",
        ),
        (
            lambda t: t.update(
                {"model.layers.1.mlp.experts.0.up_proj.weight_shape": torch.tensor([9, 9])}
            ),
            r"is \(9, 9\), expected \(16, 32\)",
        ),
    ],
)
def test_corrupt_files_are_named(target, tmp_path, change, message):
    folder = damaged(target, tmp_path / "damaged", change)
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("weights", "symmetric"), False, r"weights.symmetric must be True, got False"),
        (("weights", "num_bits"), 3, "num_bits must be 4 or 8, got 3"),
        (("input_activations", "strategy"), "tensor", "must be 'token', got 'tensor'"),
        (("input_activations",), None, "input_activations.num_bits must be 8, got None"),
        (("input_activations",), [8], r"input_activations must be an object, got \[8\]"),
        (("weights",), "int4", "weights must be an object, got 'int4'"),
        ((), ["Linear"], r"group_0 must be an object, got \['Linear'\]"),
    ],
)
def test_unknown_schemes_are_rejected(target, tmp_path, path, value, message):
    shutil.copytree(target, tmp_path / "other")
    file = tmp_path / "other" / "config.json"
    config = json.loads(file.read_text())
    table, path = config["quantization_config"]["config_groups"], ("group_0", *path)
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(tmp_path / "other")


def test_online_rotations_are_rejected(target, tmp_path):
    shutil.copytree(target, tmp_path / "other")
    file = tmp_path / "other" / "config.json"
    config = json.loads(file.read_text())
    turns = {"R4": {"type": "hadamard", "apply": [{"targets": ["down_proj"], "location": "input"}]}}
    config["quantization_config"]["transform_config"] = {"config_groups": turns}
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="transform_config: online rotations"):
        load_pretrained(tmp_path / "other")
