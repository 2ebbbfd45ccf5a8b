"""The trunk and the indexer have separate losses; neither gets gradients from the other's."""

import pytest
import torch

from paddock.model import AttentionMetadata, AuxRequest
from tests.model.networks import build_network, latent_config, tokens


def gradients(network) -> dict[str, bool]:
    """Which parameters have a nonzero gradient."""
    return {
        name: parameter.grad is not None and bool(parameter.grad.any())
        for name, parameter in network.named_parameters()
        if not name.startswith("mtp.")
    }


def test_the_language_loss_gives_the_indexer_no_gradient():
    network = build_network(latent_config())
    logits = network.logits(tokens(60))
    torch.nn.functional.cross_entropy(logits[:-1], tokens(60)[1:]).backward()
    moved = gradients(network)
    assert {name for name in moved if ".indexer." in name and moved[name]} == set()
    unmoved = {name for name in moved if ".indexer." not in name and not moved[name]}
    assert unmoved == set()


@pytest.mark.parametrize("dense", [True, False])
def test_the_indexer_loss_gives_the_trunk_no_gradient(dense):
    network = build_network(latent_config())
    aux = AuxRequest(dense=dense, indexer_loss=True)
    notes = network(tokens(60), AttentionMetadata.packed([45, 15]), aux=aux).aux
    sum(note.indexer_loss for note in notes).backward()
    moved = gradients(network)
    assert {name for name in moved if ".indexer." not in name and moved[name]} == set()
    assert {name for name in moved if ".indexer." in name and not moved[name]} == set()


def test_the_indexer_loss_decreases_in_warm_up():
    network = build_network(latent_config())
    layout, aux = AttentionMetadata.packed([60]), AuxRequest(dense=True, indexer_loss=True)
    indexers = [p for name, p in network.named_parameters() if ".indexer." in name]
    optimizer = torch.optim.Adam(indexers, lr=1e-2)

    def loss() -> torch.Tensor:
        return sum(note.indexer_loss for note in network(tokens(60), layout, aux=aux).aux)

    before = loss().item()
    for _ in range(30):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert loss().item() < 0.7 * before


def test_layers_report_no_loss_unless_requested():
    notes = build_network(latent_config())(tokens(20), AttentionMetadata.packed([20])).aux
    assert all(n.indexer_loss is None and n.selection is None for n in notes)
