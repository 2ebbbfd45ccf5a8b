"""A trainer broadcasts over NCCL to an engine on a GPU.

Both share one GPU, which NCCL does not allow for ranks of one host: each uses its own host id, so
they communicate through sockets, as two hosts would.
"""

import pytest
import torch

from paddock.checkpoint import CheckpointError
from paddock.engine import EngineWeightUpdater
from tests.engine.broadcast_trainer import trainer
from tests.engine.networks import copy_of, engine, greedy, network
from tests.engine.test_weight_broadcast import Group, TensorSpec, specs
from tests.engine.weight_updates import (
    NORM,
    PROMPTS,
    assert_serves_new_weights,
    buckets,
    digests,
    tensors,
)

pytestmark = pytest.mark.gpu


@pytest.fixture
def serving(monkeypatch):
    monkeypatch.setenv("NCCL_HOSTID", "engine")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    with engine(copy_of(network("sparse")).cuda(), cuda_graphs=False) as found:
        yield found
        assert found.audit() == []


def test_a_trainer_broadcasts_over_nccl(serving):
    updater = EngineWeightUpdater(serving, timeout_s=60)
    with trainer(world_size=2, backend="nccl") as (commands, port):
        updater.init_group(Group(port, 1, backend="nccl"))
        serving.generate_outputs(map(greedy, PROMPTS))
        serving.pause("retract")
        for names in buckets(3):
            commands.send(names)
            updater.update_from_distributed("weights", specs(names), version=7, mode="in_place")
            assert commands.recv() == "sent"
        serving.resume()
        assert_serves_new_weights(serving)
        assert updater.checksums() == digests("new")
        updater.destroy_group("weights")


def test_wrong_tensor_specs_are_rejected_and_the_group_stays_usable(serving):
    updater = EngineWeightUpdater(serving, timeout_s=60)
    with trainer(world_size=2, backend="nccl") as (commands, port):
        updater.init_group(Group(port, 1, backend="nccl"))
        commands.send([NORM])
        with pytest.raises(CheckpointError, match="has shape"):
            updater.update_from_distributed(
                "weights", [TensorSpec(NORM, "float32", (4, 8))], version=7, mode="abort"
            )
        assert commands.recv() == "sent"
        assert updater.checksums() == digests("old")
        names = list(tensors())
        commands.send(names)
        updater.update_from_distributed("weights", specs(names), version=7, mode="abort")
        assert commands.recv() == "sent"
    torch.accelerator.synchronize()
    assert_serves_new_weights(serving)
