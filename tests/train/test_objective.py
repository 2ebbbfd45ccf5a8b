import pytest
import torch
from torch.nn import functional as F

from paddock.train.micro_batch import count_tokens, iter_micro_batches
from paddock.train.objective import LanguageModelObjective
from paddock.train.settings import AuxLossSettings
from paddock.train.stages import STAGES
from tests.model.networks import build_network, latent_config
from tests.train.test_micro_batch import batch_of

BATCH = batch_of(14, 5, 9, 1)


def losses_of(network, stage="pretrain", micro=None, progress=0.0, **changes):
    settings = AuxLossSettings(**changes)
    objective = LanguageModelObjective(STAGES[stage], settings)
    total = count_tokens(BATCH, settings.mtp_depths)
    return [
        objective(network, part, total, progress)
        for part in iter_micro_batches(BATCH, torch.device("cpu"), micro)
    ]


def gradients(network):
    return {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}


def test_the_loss_is_the_mean_cross_entropy_of_next_tokens():
    network = build_network(latent_config())
    (found,) = losses_of(network, "sparse", mtp_coef=0.0, balance_coef=0.0, indexer_coef=0.0)
    expected, count = 0.0, 0
    start = 0
    for length in BATCH.lengths:
        document = torch.arange(start, start + length) + 10
        start += length
        if length > 1:
            logits = network.logits(document).detach()
            expected += float(F.cross_entropy(logits[:-1], document[1:], reduction="sum"))
            count += length - 1
    assert found.total.item() == pytest.approx(expected / count, rel=1e-4)


@pytest.mark.parametrize("stage", ["pretrain", "sparse", "warmup"])
def test_micro_batches_add_up_to_the_whole_batch(stage):
    network = build_network(latent_config())
    STAGES[stage].freeze(network)
    (whole,) = losses_of(network, stage)
    whole.total.backward()
    expected = gradients(network)
    network.zero_grad()
    for part in losses_of(network, stage, micro=10):
        part.total.backward()
    found = gradients(network)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=2e-5, rtol=1e-3, msg=name)


def test_the_warm_up_trains_only_the_indexers():
    network = build_network(latent_config())
    STAGES["warmup"].freeze(network)
    (found,) = losses_of(network, "warmup")
    assert set(found.parts) == {"indexer_loss"}
    found.total.backward()
    moved = {name for name, grad in gradients(network).items() if grad.any()}
    assert moved == {name for name, _ in network.named_parameters() if ".indexer." in name}
    assert any(name.startswith("mtp.") for name in moved)


def test_the_mtp_weight_decreases_during_the_run():
    network = build_network(latent_config())
    early, late = (
        losses_of(
            network,
            progress=p,
            mtp_coef=0.3,
            mtp_coef_final=0.1,
            mtp_coef_switch=0.5,
            balance_coef=0.0,
        )[0]
        for p in (0.4, 0.6)
    )
    mtp = early.parts["mtp_loss"].item()
    assert early.total.item() - late.total.item() == pytest.approx(0.2 * mtp, rel=1e-4)


def test_mtp_is_the_mean_over_depths_of_the_loss_further_ahead():
    network = build_network(latent_config())
    (one,) = losses_of(network, mtp_depths=1)
    (three,) = losses_of(network, mtp_depths=3)
    assert three.parts["mtp_loss"].item() != pytest.approx(one.parts["mtp_loss"].item())
    assert three.parts["loss"].item() == pytest.approx(one.parts["loss"].item())


def test_loads_count_every_token_of_every_expert_layer():
    (found,) = losses_of(build_network(latent_config()))
    # Three expert layers of the trunk, and the MTP layer with its three depths.
    assert [int(load.sum()) for load in found.expert_loads] == [29 * 2] * 3 + [29 * 2 * 3]
