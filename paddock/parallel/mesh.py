"""Which ranks work together, and on what.

Ranks form a box of data x expert x context. Every rank holds a different part of the network, and
each of these groupings is an `Axis`:

everyone  all ranks: shards of every weight that is not split by expert
shares    data x expert: each reads documents of its own
context   pieces of one share's row of tokens
expert    different experts of a layer; tokens travel along it
holders   data x context: shards of the same experts
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# The first rank may prepare a corpus while the others wait for it.
PROCESS_GROUP_TIMEOUT = timedelta(hours=2)


class MeshError(ValueError):
    """Sizes that do not fit; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDegrees:
    data: int = 1
    expert: int = 1
    context: int = 1

    @property
    def ranks(self) -> int:
        return self.data * self.expert * self.context


@dataclass(frozen=True, slots=True)
class MeshDim:
    """Ranks that act together. Without a mesh there is one, and collectives do nothing."""

    mesh: DeviceMesh | None = None  # of one dimension

    @property
    def size(self) -> int:
        return 1 if self.mesh is None else self.mesh.size()

    @property
    def rank(self) -> int:
        return 0 if self.mesh is None else self.mesh.get_local_rank()

    @property
    def group(self) -> dist.ProcessGroup | None:
        return None if self.mesh is None else self.mesh.get_group()

    def local_slice(self, count: int) -> slice:
        """This rank's equal part of `count` things in order; MeshError if they cannot be dealt."""
        if count % self.size:
            raise MeshError(f"{count} cannot be split evenly over {self.size} ranks")
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)


SINGLE_RANK = MeshDim()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The box seen from one rank. The default is a single process."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    all_ranks: MeshDim = SINGLE_RANK
    data_ranks: MeshDim = SINGLE_RANK
    context: MeshDim = SINGLE_RANK
    expert: MeshDim = SINGLE_RANK
    expert_fsdp: MeshDim = SINGLE_RANK

    @property
    def is_rank_zero(self) -> bool:
        """Whether this rank writes to disk and speaks to people."""
        return self.all_ranks.rank == 0

    @contextmanager
    def rank_zero_first(self) -> Iterator[None]:
        """The first rank goes through the block before the others, which find what it has made."""
        if not self.is_rank_zero:
            dist.barrier(self.all_ranks.group)
        yield
        if self.is_rank_zero and self.all_ranks.size > 1:
            dist.barrier(self.all_ranks.group)


SINGLE_PROCESS = Mesh()


def is_rank_zero() -> bool:
    """Whether this is the process that speaks, of those torchrun started or alone."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def init_mesh(sizes: ParallelDegrees, device: torch.device) -> Iterator[Mesh]:
    """The mesh of the processes torchrun started, each on its own device of this kind; they part
    when the block ends. Without torchrun: a single process."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if sizes.ranks != started:
        raise MeshError(
            f"parallel: data {sizes.data} x expert {sizes.expert} x context {sizes.context} is "
            f"{sizes.ranks} ranks, but {started} were started; change the sizes or start "
            f"torchrun with {sizes.ranks} processes"
        )
    if started == 1:
        yield Mesh(device=device)
        return
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        timeout=PROCESS_GROUP_TIMEOUT,
        device_id=None if device.type == "cpu" else device,
    )
    try:
        yield _box(sizes, device)
    finally:
        dist.destroy_process_group()


def _box(sizes: ParallelDegrees, device: torch.device) -> Mesh:
    rank_DEC = torch.arange(sizes.ranks).view(sizes.data, sizes.expert, sizes.context)

    def mesh(ranks: torch.Tensor, *names: str) -> DeviceMesh:
        return DeviceMesh(device.type, ranks, mesh_dim_names=names)

    everyone = mesh(rank_DEC.flatten(), "everyone")
    read = mesh(rank_DEC.flatten(0, 1), "shares", "context")
    hold = mesh(rank_DEC.transpose(0, 1).flatten(1), "expert", "holders")
    return Mesh(
        device=device,
        all_ranks=MeshDim(everyone),
        data_ranks=MeshDim(read["shares"]),
        context=MeshDim(read["context"]),
        expert=MeshDim(hold["expert"]),
        expert_fsdp=MeshDim(hold["holders"]),
    )
