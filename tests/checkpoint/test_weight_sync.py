"""Weight updates are applied completely and bitwise, or rejected with nothing written."""

import pickle

import pytest
import torch
from safetensors.torch import save

from paddock.checkpoint import CheckpointError, load_pretrained, save_pretrained
from paddock.checkpoint.weight_sync import (
    WeightUpdate,
    deserialize_update,
    iter_released_tensors,
    load_weights,
    serialize_update,
    tensor_digest,
    weight_digests,
)
from paddock.model import Transformer
from tests.model.networks import latent_config


def network(seed: int) -> Transformer:
    return Transformer.from_config(latent_config(), seed)


def everything(of: Transformer) -> dict[str, torch.Tensor]:
    return dict(iter_released_tensors(of))


def test_names_and_values_match_a_saved_folder(tmp_path):
    sender = network(1)
    save_pretrained(sender, tmp_path / "saved")
    assert weight_digests(load_pretrained(tmp_path / "saved")) == weight_digests(sender)
    names = {name for name, _ in iter_released_tensors(sender)}
    assert "model.layers.1.mlp.experts.0.gate_proj.weight" in names
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in names


def test_a_received_network_has_the_senders_logits():
    sender, receiver = network(1), network(2)
    tokens = [1, 2, 3, 4, 5]
    assert not torch.equal(sender.logits(tokens), receiver.logits(tokens))
    load_weights(
        receiver,
        deserialize_update(serialize_update(WeightUpdate(7, everything(sender)))).tensors,
        whole=True,
    )
    assert torch.equal(sender.logits(tokens), receiver.logits(tokens))
    assert weight_digests(receiver) == weight_digests(sender)


def test_a_part_may_be_sent_alone_and_leaves_the_rest():
    receiver, name = network(2), "model.layers.0.self_attn.o_proj.weight"
    before = weight_digests(receiver)
    load_weights(receiver, {name: torch.ones_like(everything(receiver)[name])}, whole=False)
    after = weight_digests(receiver)
    assert {n for n in before if before[n] != after[n]} == {name}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t | {"model.layers.9.x": torch.ones(1)}, "unexpected tensor"),
        (lambda t: t | {"model.norm.weight": torch.ones(3)}, "has shape"),
        (lambda t: {n: x for n, x in t.items() if n != "model.norm.weight"}, "is missing"),
        (lambda t: t | {"model.norm.weight": t["model.norm.weight"] * torch.nan}, "nan"),
    ],
)
def test_invalid_updates_change_nothing(change, reason):
    sender, receiver = network(1), network(2)
    before = weight_digests(receiver)
    with pytest.raises(CheckpointError, match=reason):
        load_weights(receiver, change(everything(sender)), whole=True)
    assert weight_digests(receiver) == before


def test_half_precision_fills_a_float32_network():
    sender, receiver = network(1).cast(torch.bfloat16), network(2)
    load_weights(receiver, everything(sender), whole=True)
    assert torch.equal(receiver.head.weight, sender.head.weight.float())


def test_a_flipped_bit_is_detected():
    data = bytearray(serialize_update(WeightUpdate(3, {"model.norm.weight": torch.ones(8)})))
    data[-3] ^= 1
    with pytest.raises(CheckpointError, match=r"'model.norm.weight' was corrupted in transit"):
        deserialize_update(bytes(data))


def test_the_version_is_in_the_header():
    tensors = {"model.norm.weight": torch.ones(8)}
    assert deserialize_update(serialize_update(WeightUpdate(3, tensors))).version == 3
    assert deserialize_update(save(tensors), version=4).version == 4
    with pytest.raises(CheckpointError, match="no version in its header"):
        deserialize_update(save(tensors))
    with pytest.raises(CheckpointError, match="negative"):
        WeightUpdate(-1, tensors)


@pytest.mark.parametrize("data", [b"", b"\x00" * 8, pickle.dumps({"a": 1}), b"\xff" * 64])
def test_other_bytes_than_safetensors_are_rejected(data):
    with pytest.raises(CheckpointError, match="pickle is never read"):
        deserialize_update(data)


def test_checksums_depend_on_the_dtype():
    assert tensor_digest(torch.zeros(4)) != tensor_digest(torch.zeros(2, dtype=torch.float64))
