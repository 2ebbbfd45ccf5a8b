"""A trainer broadcasts over NCCL to an engine on a GPU.

Both share one GPU, which NCCL refuses to ranks of one host: each names a host of its own, so they
talk through sockets, as two machines would.
"""

import pytest
import torch

from paddock.checkpoint import CheckpointError
from paddock.engine import EngineWeightUpdater
from tests.engine.broadcast_trainer import trainer
from tests.engine.networks import copy_of, engine, greedy, network
from tests.engine.test_weight_broadcast import Group, Sent, sent
from tests.engine.weight_updates import NORM, PROMPTS, assert_new, buckets, sums, tensors

pytestmark = pytest.mark.gpu


@pytest.fixture
def serving(monkeypatch):
    monkeypatch.setenv("NCCL_HOSTID", "engine")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    with engine(copy_of(network("sparse")).cuda(), cuda_graphs=False) as found:
        yield found
        assert found.audit() == []


def test_a_trainer_broadcasts_over_nccl(serving):
    reload = EngineWeightUpdater(serving, timeout_s=60)
    with trainer(world=2, backend="nccl") as (orders, port):
        reload.init_group(Group(port, 1, backend="nccl"))
        serving.generate_outputs(map(greedy, PROMPTS))
        serving.pause("retract")
        for names in buckets(3):
            orders.send(names)
            reload.update_from_distributed("weights", sent(names), version=7, mode="in_place")
            assert orders.recv() == "sent"
        serving.resume()
        assert_new(serving)
        assert reload.checksums() == sums("new")
        reload.destroy_group("weights")


def test_what_nccl_brings_wrongly_is_refused_and_the_group_goes_on(serving):
    reload = EngineWeightUpdater(serving, timeout_s=60)
    with trainer(world=2, backend="nccl") as (orders, port):
        reload.init_group(Group(port, 1, backend="nccl"))
        orders.send([NORM])
        with pytest.raises(CheckpointError, match="has shape"):
            reload.update_from_distributed(
                "weights", [Sent(NORM, "float32", (4, 8))], version=7, mode="abort"
            )
        assert orders.recv() == "sent"
        assert reload.checksums() == sums("old")
        names = list(tensors())
        orders.send(names)
        reload.update_from_distributed("weights", sent(names), version=7, mode="abort")
        assert orders.recv() == "sent"
    torch.accelerator.synchronize()
    assert_new(serving)
