"""The MTP layer: saved and loaded here, ignored by transformers, never partial."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from paddock.checkpoint import CheckpointError, load_pretrained, save_pretrained
from paddock.model.config import IndexerSettings
from tests.checkpoint.transformers_models import (
    LATENT,
    SPARSE,
    TOLERANCE,
    distance,
    load_with_transformers,
    our_logits,
    random_model,
    transformers_logits,
)
from tests.model.networks import build_network, latent_config

WEIGHTS = "model.safetensors"
PARTS = {"enorm", "hnorm", "eh_proj", "shared_head"}


@pytest.fixture
def network():
    indexer = IndexerSettings(heads=16, dim=8, topk=8, layers=("full", "shared", "full", "shared"))
    mla = latent_config().mla.model_copy(update={"norm_eps": 1e-6})
    return build_network(latent_config(indexer=indexer, mla=mla))


@pytest.fixture
def saved(network, tmp_path):
    save_pretrained(network, tmp_path / "saved")
    return tmp_path / "saved"


def rewrite(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def test_mtp_round_trips_bitwise(network, saved):
    again = load_pretrained(saved)
    assert again.config.mtp == network.config.mtp
    before, after = network.mtp.state_dict(), again.mtp.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_mtp_is_stored_after_the_last_layer(network, saved):
    names = [name for name in load_file(saved / WEIGHTS) if name.startswith("model.layers.4.")]
    assert {name.split(".")[3] for name in names} >= PARTS
    # The last layer shares an indexer; the MTP layer has none to share.
    assert "model.layers.4.self_attn.indexer.wk.weight" in names


def test_transformers_reads_the_network_and_ignores_mtp(network, saved):
    theirs, unplaced = load_with_transformers("GlmMoeDsa", saved)
    assert unplaced
    assert all(name.startswith("model.layers.4.") for name in unplaced)
    theirs_logits = their_logits_of(theirs, network.config.vocab)
    assert distance(our_logits_of(network), theirs_logits) <= TOLERANCE


@torch.no_grad()
def their_logits_of(model, vocab):
    return model(torch.arange(24).unsqueeze(0) % vocab).logits[0]


@torch.no_grad()
def our_logits_of(network):
    return network.logits(torch.arange(24) % network.config.vocab)


@pytest.mark.parametrize(
    ("family", "settings"),
    [("GlmMoeDsa", SPARSE), ("Glm4MoeLite", LATENT), ("DeepseekV3", LATENT)],
)
def test_mtp_that_is_missing_entirely_is_left_out(family, settings, tmp_path):
    theirs = random_model(family, settings | {"num_nextn_predict_layers": 1})
    theirs.save_pretrained(tmp_path)
    ours = load_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert ours.mtp is None and ours.config.mtp is None
    assert distance(our_logits(ours), transformers_logits(theirs)) <= TOLERANCE


@pytest.mark.parametrize("name", ["eh_proj.weight", "self_attn.indexer.wk.weight"])
def test_partial_mtp_weights_are_rejected(saved, name):
    rewrite(saved, lambda tensors: tensors.pop(f"model.layers.4.{name}"))
    with pytest.raises(CheckpointError, match=rf"'model.layers.4.{name}' is missing$"):
        load_pretrained(saved)


def test_unexpected_mtp_weights_are_rejected(saved):
    config = json.loads((saved / "config.json").read_text())
    config["num_nextn_predict_layers"] = 0
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"unexpected tensor 'model.layers.4"):
        load_pretrained(saved)


def test_copies_of_embedding_and_head_in_the_mtp_layer_change_nothing(network, saved):
    def add_copies(tensors):
        tensors["model.layers.4.embed_tokens.weight"] = torch.zeros(50, 32)
        tensors["model.layers.4.shared_head.head.weight"] = torch.zeros(50, 32)

    rewrite(saved, add_copies)
    assert torch.equal(our_logits_of(load_pretrained(saved)), our_logits_of(network))


def test_two_mtp_layers_are_rejected(saved):
    config = json.loads((saved / "config.json").read_text())
    config["num_nextn_predict_layers"] = 2
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"'num_nextn_predict_layers' must be .*got 2"):
        load_pretrained(saved)


def test_the_familys_own_layout_keeps_mtp_too(tmp_path):
    network = build_network(latent_config(family="paddock"))
    save_pretrained(network, tmp_path / "own")
    again = load_pretrained(tmp_path / "own")
    assert again.config == network.config
    assert torch.equal(again.mtp.join.weight, network.mtp.join.weight)
