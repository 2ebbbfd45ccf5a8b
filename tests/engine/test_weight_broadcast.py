"""A trainer in another process broadcasts its weights, well or badly."""

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
    assert_new,
    assert_untouched,
    buckets,
    sums,
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
class Sent:
    name: str
    dtype: str
    shape: tuple[int, ...]


def sent(names, dtype="float32"):
    return [Sent(name, dtype, tuple(tensors()[name].shape)) for name in names]


def in_threads(*acts):
    async def main():
        return await asyncio.gather(*(asyncio.to_thread(act) for act in acts))

    return asyncio.run(main())


def test_a_trainer_broadcasts_to_two_replicas(serving):
    """The sequence of slime: join, pause, flush until it is done, buckets, continue, compare."""
    with engine(copy_of(network("sparse"))) as twin, trainer(world=3) as (orders, port):
        both = [EngineWeightUpdater(each, timeout_s=60) for each in (serving, twin)]
        in_threads(*(partial(r.init_group, Group(port, i, 3)) for i, r in enumerate(both, start=1)))
        for each in (serving, twin):
            each.generate_outputs(map(greedy, PROMPTS))
            each.pause("abort")
            while not each.flush_cache():
                pass
        for names in buckets(3, mtp=False):
            orders.send(names)
            asked = {"tensors": sent(names), "version": 7, "mode": "in_place"}
            in_threads(
                *(partial(reload.update_from_distributed, "weights", **asked) for reload in both)
            )
            assert orders.recv() == "sent"
        for reload in both:
            reload.engine.resume()
            assert_new(reload.engine)
            own = {n: s for n, s in sums("old").items() if is_mtp(n, other().config)}
            assert reload.checksums() == sums("new") | own
            reload.destroy_group("weights")
            with pytest.raises(ValueError, match="group 'weights' not found"):
                reload.update_from_distributed("weights", [], version=8, mode="in_place")
        assert twin.audit() == []


def test_what_is_announced_wrongly_is_received_refused_and_the_group_goes_on(serving):
    reload = EngineWeightUpdater(serving, timeout_s=60)
    with trainer(world=2) as (orders, port):
        reload.init_group(Group(port, 1))
        for name, dtype, shape, why in [
            ("model.norm.weight.long", "float32", (40,), "unexpected tensor"),
            (NORM, "float32", (4, 8), "has shape"),
        ]:
            orders.send([name])
            with pytest.raises(CheckpointError, match=why):
                reload.update_from_distributed(
                    "weights", [Sent(name, dtype, shape)], version=7, mode="abort"
                )
            assert orders.recv() == "sent"
        for name, dtype, shape, why in [  # of these nothing can be received
            (NORM, "float33", (32,), "is float33"),
            (NORM, "float32", (-1,), "cannot have shape"),
            (NORM, "float32", (1 << 40,), "too many"),
        ]:
            with pytest.raises(CheckpointError, match=why):
                reload.update_from_distributed(
                    "weights", [Sent(name, dtype, shape)], version=7, mode="abort"
                )
        assert_untouched(serving, reload)
        names = list(tensors())
        orders.send(names)
        reload.update_from_distributed(
            "weights", sent(names, "torch.float32"), version=7, mode="abort"
        )
        assert orders.recv() == "sent"
    assert_new(serving)


@pytest.mark.parametrize(
    ("end", "timeout_s"), [(None, 60.0), (..., 4.0)], ids=["dies", "falls silent"]
)
def test_a_trainer_that_ends_in_the_middle_is_an_error_and_the_engine_goes_on(
    serving, end, timeout_s
):
    reload = EngineWeightUpdater(serving, timeout_s=timeout_s)
    first, second, *_ = buckets(4)
    with trainer(world=2) as (orders, port):
        reload.init_group(Group(port, 1))
        serving.pause("retract")
        orders.send(first)
        reload.update_from_distributed("weights", sent(first), version=7, mode="in_place")
        orders.send([*second[:2], end])
        with pytest.raises(ValueError, match=r"did not receive .*; \d+ tensors .* rolled back"):
            reload.update_from_distributed("weights", sent(second), version=7, mode="in_place")
        serving.resume()
        assert_untouched(serving, reload)
        with pytest.raises(ValueError, match="join the group again"):
            reload.update_from_distributed("weights", sent(second), version=7, mode="in_place")
    reload.timeout_s = 60.0
    with trainer(world=2) as (orders, port):  # another takes its place
        reload.init_group(Group(port, 1))
        orders.send(list(tensors()))
        reload.update_from_distributed("weights", sent(tensors()), version=7, mode="in_place")
    assert_new(serving)


def test_a_group_that_cannot_be_joined_says_why(serving):
    reload = EngineWeightUpdater(serving, timeout_s=0.2)
    with pytest.raises(
        ValueError,
        match=r"group 'weights' could not be joined: no store is listening at 127.0.0.1:9",
    ):
        reload.init_group(Group(port=9, rank=1))
    with pytest.raises(ValueError, match="backend must be one of gloo, nccl, got 'mpi'"):
        reload.init_group(Group(port=9, rank=1, backend="mpi"))
    with pytest.raises(ValueError, match="nccl needs a GPU"):
        reload.init_group(Group(port=9, rank=1, backend="nccl"))
    with pytest.raises(ValueError, match=r"rank must be in \[1, 2\)"):
        reload.init_group(Group(port=9, rank=0))
    with pytest.raises(ValueError, match="group 'weights' not found"):
        reload.destroy_group("weights")
    assert_untouched(serving, reload)
