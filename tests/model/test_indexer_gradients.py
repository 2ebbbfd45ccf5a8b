"""The trunk and the indexer learn from different losses and never from each other's."""

import pytest
import torch

from paddock.model import AttentionMetadata, AuxRequest
from tests.model.networks import born, latent_config, tokens


def gradients(network) -> dict[str, bool]:
    """Whether each parameter has a gradient that is not zero."""
    return {
        name: parameter.grad is not None and bool(parameter.grad.any())
        for name, parameter in network.named_parameters()
        if not name.startswith("mtp.")
    }


def test_the_language_loss_gives_the_indexer_no_gradient():
    network = born(latent_config())
    logits = network.logits(tokens(60))
    torch.nn.functional.cross_entropy(logits[:-1], tokens(60)[1:]).backward()
    moved = gradients(network)
    assert {name for name in moved if ".indexer." in name and moved[name]} == set()
    unmoved = {name for name in moved if ".indexer." not in name and not moved[name]}
    assert unmoved == set()


@pytest.mark.parametrize("dense", [True, False])
def test_the_indexer_loss_gives_the_trunk_no_gradient(dense):
    network = born(latent_config())
    ask = AuxRequest(dense=dense, indexer_loss=True)
    notes = network(tokens(60), AttentionMetadata.packed([45, 15]), aux=ask).aux
    sum(note.indexer_loss for note in notes).backward()
    moved = gradients(network)
    assert {name for name in moved if ".indexer." not in name and moved[name]} == set()
    assert {name for name in moved if ".indexer." in name and not moved[name]} == set()


def test_the_warm_up_teaches_the_indexer_where_attention_looks():
    network = born(latent_config())
    layout, ask = AttentionMetadata.packed([60]), AuxRequest(dense=True, indexer_loss=True)
    indexers = [p for name, p in network.named_parameters() if ".indexer." in name]
    optimizer = torch.optim.Adam(indexers, lr=1e-2)

    def loss() -> torch.Tensor:
        return sum(note.indexer_loss for note in network(tokens(60), layout, aux=ask).aux)

    before = loss().item()
    for _ in range(30):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert loss().item() < 0.7 * before


def test_a_layer_that_was_not_asked_reports_nothing():
    notes = born(latent_config())(tokens(20), AttentionMetadata.packed([20])).aux
    assert all(n.indexer_loss is None and n.selection is None for n in notes)
