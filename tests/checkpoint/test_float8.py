"""Released float8 checkpoints: e4m3 weights with one scale per block of 128 x 128."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from paddock.checkpoint import CheckpointError, load_pretrained, save_pretrained
from paddock.model.config import MLASettings, MoESettings
from tests.model.networks import build_network, latent_config

WEIGHTS = "model.safetensors"
# Sizes below, at and beyond a block, and no multiple of one.
CONFIG = latent_config(
    hidden=160,
    attention=("dsa",) * 2,
    mlp=("dense", "moe"),
    dense_inner=300,
    mla=MLASettings(heads=2, q_rank=40, kv_rank=128, nope=60, rope=8, value=70),
    indexer=latent_config().indexer.model_copy(update={"layers": ("full", "full")}),
    moe=MoESettings(experts=2, active=1, inner=136),
    mtp=None,
)
KEPT = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "weights_proj")
CUT = "model.layers.1.mlp.experts.1.gate_proj.weight"


def quantize(weight):
    """Quantize block by block: the stored bytes, their scales and the dequantized product."""
    rows, columns = weight.shape
    stored = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scale = torch.empty(-(-rows // 128), -(-columns // 128))
    product = torch.empty_like(weight)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
            scale[i, j] = weight[block].abs().max() / 448
            stored[block] = (weight[block] / scale[i, j]).to(torch.float8_e4m3fn)
            product[block] = stored[block].float() * scale[i, j]
    return stored, scale, product


@pytest.fixture(scope="module")
def network():
    return build_network(CONFIG)


@pytest.fixture
def float8(network, tmp_path):
    """The network as a float8 folder, and the weights expected after loading."""
    save_pretrained(network, tmp_path / "float8")
    tensors, products = {}, {}
    for name, tensor in load_file(tmp_path / "float8" / WEIGHTS).items():
        if any(part in name for part in KEPT):
            tensors[name] = products[name] = tensor
        else:
            tensors[name], tensors[f"{name}_scale_inv"], products[name] = quantize(tensor)
    save_file(tensors, tmp_path / "float8" / WEIGHTS)
    config = json.loads((tmp_path / "float8" / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    (tmp_path / "float8" / "config.json").write_text(json.dumps(config))
    return tmp_path / "float8", products


def change(folder, **changes):
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / WEIGHTS)


def test_weights_are_the_explicit_product(network, float8, tmp_path):
    folder, products = float8
    save_pretrained(load_pretrained(folder), tmp_path / "plain")
    plain = load_file(tmp_path / "plain" / WEIGHTS)
    assert plain.keys() == products.keys()
    assert all(torch.equal(plain[name], products[name]) for name in plain)
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    # Quantized weights are close to the original ones, but not the same.
    original = network.layers[1].mlp.experts.gate_up[1, :136]
    assert not torch.equal(plain[CUT], original)
    assert torch.allclose(plain[CUT], original, rtol=0.07, atol=1e-3)


def test_in_bfloat16_the_product_is_rounded_once(float8):
    folder, products = float8
    weight = load_pretrained(folder, "bfloat16").layers[1].mlp.experts.gate_up[1, :136]
    assert torch.equal(weight, products[CUT].bfloat16())


def test_scales_may_be_stored_in_bfloat16(float8):
    folder, _ = float8
    scale = load_file(folder / WEIGHTS)[f"{CUT}_scale_inv"].bfloat16()
    stored = load_file(folder / WEIGHTS)[CUT]
    change(folder, **{f"{CUT}_scale_inv": scale})
    expected = stored[:128, :128].float() * scale[0, 0].float()
    assert torch.equal(
        load_pretrained(folder).layers[1].mlp.experts.gate_up[1, :128, :128], expected
    )


def test_a_missing_scale_is_named(float8):
    change(float8[0], **{f"{CUT}_scale_inv": None})
    with pytest.raises(CheckpointError, match=rf"'{CUT}' is torch.float8_e4m3fn with no '{CUT}_s"):
        load_pretrained(float8[0])


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (2, 2, 1), (4,), ()])
def test_a_mis_shaped_scale_is_named_with_both_shapes(float8, shape):
    change(float8[0], **{f"{CUT}_scale_inv": torch.ones(shape)})
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(float8[0])
    assert f"tensor '{CUT}' has scales of shape {shape}, not (2, 2)" in str(caught.value)


def test_a_scale_without_float8_weights_is_rejected(float8):
    change(float8[0], **{CUT: torch.zeros(136, 160)})
    with pytest.raises(CheckpointError, match=rf"'{CUT}' is torch.float32 with a '{CUT}_scale"):
        load_pretrained(float8[0])


def test_a_scale_without_any_weights_is_rejected(float8):
    change(float8[0], **{"model.layers.9.x.weight_scale_inv": torch.ones(1, 1)})
    with pytest.raises(
        CheckpointError, match=r"unexpected tensor 'model.layers.9.x.weight_scale_inv'"
    ):
        load_pretrained(float8[0])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nan_scale_is_rejected(float8, value):
    scale = load_file(float8[0] / WEIGHTS)[f"{CUT}_scale_inv"]
    scale[1, 0] = value
    change(float8[0], **{f"{CUT}_scale_inv": scale})
    with pytest.raises(CheckpointError, match=rf"'{CUT}' holds .* at \(128, 0\)"):
        load_pretrained(float8[0])


def test_e5m2_is_rejected(float8):
    stored = load_file(float8[0] / WEIGHTS)[CUT]
    change(float8[0], **{CUT: stored.float().to(torch.float8_e5m2)})
    with pytest.raises(CheckpointError, match=rf"'{CUT}' is torch.float8_e5m2"):
        load_pretrained(float8[0])


def test_a_float8_vector_is_rejected(float8):
    name = "model.norm.weight"
    vector = torch.ones(160).to(torch.float8_e4m3fn)
    change(float8[0], **{name: vector, f"{name}_scale_inv": torch.ones(2)})
    with pytest.raises(CheckpointError, match=rf"'{name}' is float8 of shape \(160,\), not a mat"):
        load_pretrained(float8[0])
