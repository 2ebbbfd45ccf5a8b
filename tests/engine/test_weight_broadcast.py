"""Weight broadcast from a trainer in another process, and its failures."""

import asyncio
from dataclasses import dataclass
from functools import partial

import pytest

from paddock.checkpoint import CheckpointError
from paddock.checkpoint.tensor_names import is_mtp
from paddock.engine import EngineWeightUpdater
from tests.engine.broadcast_trainer import trainer
from tests.engine.networks import copy_of, engine, greedy, network
from tests.engine.test_weight_versions import other
from tests.engine.weight_updates import (
    NORM,
    PROMPTS,
    assert_serves_new_weights,
    assert_serves_old_weights,
    buckets,
    digests,
    tensors,
)


@pytest.fixture
def serving():
    with engine(copy_of(network("sparse"))) as found:
        yield found
        assert found.audit() == []


@dataclass(frozen=True)
class Group:
    port: int
    rank: int
    world_size: int = 2
    name: str = "weights"
    address: str = "127.0.0.1"
    backend: str = "gloo"


@dataclass(frozen=True)
class TensorSpec:
    name: str
    dtype: str
    shape: tuple[int, ...]


def specs(names, dtype="float32"):
    return [TensorSpec(name, dtype, tuple(tensors()[name].shape)) for name in names]


def in_threads(*acts):
    async def main():
        return await asyncio.gather(*(asyncio.to_thread(act) for act in acts))

    return asyncio.run(main())


def test_a_trainer_broadcasts_to_two_replicas(serving):
    """The sequence of slime: join, pause, flush until it is done, buckets, continue, compare."""
    with engine(copy_of(network("sparse"))) as replica, trainer(world_size=3) as (commands, port):
        both = [EngineWeightUpdater(each, timeout_s=60) for each in (serving, replica)]
        in_threads(*(partial(r.init_group, Group(port, i, 3)) for i, r in enumerate(both, start=1)))
        for each in (serving, replica):
            each.generate_outputs(map(greedy, PROMPTS))
            each.pause("abort")
            while not each.flush_cache():
                pass
        for names in buckets(3, mtp=False):
            commands.send(names)
            arguments = {"tensors": specs(names), "version": 7, "mode": "in_place"}
            in_threads(
                *(
                    partial(updater.update_from_distributed, "weights", **arguments)
                    for updater in both
                )
            )
            assert commands.recv() == "sent"
        for updater in both:
            updater.engine.resume()
            assert_serves_new_weights(updater.engine)
            own = {n: s for n, s in digests("old").items() if is_mtp(n, other().config)}
            assert updater.checksums() == digests("new") | own
            updater.destroy_group("weights")
            with pytest.raises(ValueError, match="group 'weights' not found"):
                updater.update_from_distributed("weights", [], version=8, mode="in_place")
        assert replica.audit() == []


def test_wrong_tensor_specs_are_rejected_and_the_group_stays_usable(serving):
    updater = EngineWeightUpdater(serving, timeout_s=60)
    with trainer(world_size=2) as (commands, port):
        updater.init_group(Group(port, 1))
        for name, dtype, shape, why in [
            ("model.norm.weight.long", "float32", (40,), "unexpected tensor"),
            (NORM, "float32", (4, 8), "has shape"),
        ]:
            commands.send([name])
            with pytest.raises(CheckpointError, match=why):
                updater.update_from_distributed(
                    "weights", [TensorSpec(name, dtype, shape)], version=7, mode="abort"
                )
            assert commands.recv() == "sent"
        for name, dtype, shape, why in [  # nothing is received for these
            (NORM, "float33", (32,), "is float33"),
            (NORM, "float32", (-1,), "cannot have shape"),
            (NORM, "float32", (1 << 40,), "too many"),
        ]:
            with pytest.raises(CheckpointError, match=why):
                updater.update_from_distributed(
                    "weights", [TensorSpec(name, dtype, shape)], version=7, mode="abort"
                )
        assert_serves_old_weights(serving, updater)
        names = list(tensors())
        commands.send(names)
        updater.update_from_distributed(
            "weights", specs(names, "torch.float32"), version=7, mode="abort"
        )
        assert commands.recv() == "sent"
    assert_serves_new_weights(serving)


@pytest.mark.parametrize(("end", "timeout_s"), [(None, 60.0), (..., 4.0)], ids=["dies", "hangs"])
def test_a_trainer_that_dies_mid_broadcast_is_an_error_and_the_engine_keeps_serving(
    serving, end, timeout_s
):
    updater = EngineWeightUpdater(serving, timeout_s=timeout_s)
    first, second, *_ = buckets(4)
    with trainer(world_size=2) as (commands, port):
        updater.init_group(Group(port, 1))
        serving.pause("retract")
        commands.send(first)
        updater.update_from_distributed("weights", specs(first), version=7, mode="in_place")
        commands.send([*second[:2], end])
        with pytest.raises(ValueError, match=r"did not receive .*; \d+ tensors .* rolled back"):
            updater.update_from_distributed("weights", specs(second), version=7, mode="in_place")
        serving.resume()
        assert_serves_old_weights(serving, updater)
        with pytest.raises(ValueError, match="join the group again"):
            updater.update_from_distributed("weights", specs(second), version=7, mode="in_place")
    updater.timeout_s = 60.0
    with trainer(world_size=2) as (commands, port):  # a new trainer
        updater.init_group(Group(port, 1))
        commands.send(list(tensors()))
        updater.update_from_distributed("weights", specs(tensors()), version=7, mode="in_place")
    assert_serves_new_weights(serving)


def test_a_group_that_cannot_be_joined_reports_why(serving):
    updater = EngineWeightUpdater(serving, timeout_s=0.2)
    with pytest.raises(
        ValueError,
        match=r"group 'weights' could not be joined: no store is listening at 127.0.0.1:9",
    ):
        updater.init_group(Group(port=9, rank=1))
    with pytest.raises(ValueError, match="backend must be one of gloo, nccl, got 'mpi'"):
        updater.init_group(Group(port=9, rank=1, backend="mpi"))
    with pytest.raises(ValueError, match="nccl needs a GPU"):
        updater.init_group(Group(port=9, rank=1, backend="nccl"))
    with pytest.raises(ValueError, match=r"rank must be in \[1, 2\)"):
        updater.init_group(Group(port=9, rank=0))
    with pytest.raises(ValueError, match="group 'weights' not found"):
        updater.destroy_group("weights")
    assert_serves_old_weights(serving, updater)
