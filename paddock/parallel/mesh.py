"""Device mesh: data x expert x context ranks, and the groups of ranks that communicate.

Every rank holds a different shard of the network. Each group is a `MeshDim`:

all_ranks    every rank: FSDP shards of weights that are not split by expert
data_ranks   data x expert: each trains on different documents
context      shards of one row of tokens (context parallelism)
expert       different experts of a layer (expert parallelism)
expert_fsdp  data x context: FSDP shards of the same experts
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# Rank 0 may prepare a corpus while the others wait at a barrier.
PROCESS_GROUP_TIMEOUT = timedelta(hours=2)


class MeshError(ValueError):
    """Parallel degrees that do not fit; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDegrees:
    """Number of ranks along each dimension."""

    data: int = 1
    expert: int = 1
    context: int = 1

    @property
    def ranks(self) -> int:
        return self.data * self.expert * self.context


@dataclass(frozen=True, slots=True)
class MeshDim:
    """A group of ranks. Without a mesh it has one rank, and collectives do nothing."""

    mesh: DeviceMesh | None = None  # one-dimensional

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
        """This rank's equal slice of range(count); MeshError if it does not divide evenly."""
        if count % self.size:
            raise MeshError(f"{count} cannot be split evenly over {self.size} ranks")
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)


SINGLE_RANK = MeshDim()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The mesh as seen from one rank. The default is a single process."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    all_ranks: MeshDim = SINGLE_RANK
    data_ranks: MeshDim = SINGLE_RANK
    context: MeshDim = SINGLE_RANK
    expert: MeshDim = SINGLE_RANK
    expert_fsdp: MeshDim = SINGLE_RANK

    @property
    def is_rank_zero(self) -> bool:
        """Whether this rank writes to disk and logs."""
        return self.all_ranks.rank == 0

    @contextmanager
    def rank_zero_first(self) -> Iterator[None]:
        """Rank 0 runs the block before the others, which can use what it has written."""
        if not self.is_rank_zero:
            dist.barrier(self.all_ranks.group)
        yield
        if self.is_rank_zero and self.all_ranks.size > 1:
            dist.barrier(self.all_ranks.group)


SINGLE_PROCESS = Mesh()


def is_rank_zero() -> bool:
    """Whether this process is rank 0 of torchrun, or was started without it."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def init_mesh(sizes: ParallelDegrees, device: torch.device) -> Iterator[Mesh]:
    """The mesh of the processes that torchrun started, one device of this type each; the process
    group is destroyed when the block ends. Without torchrun: a single process."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if sizes.ranks != world_size:
        raise MeshError(
            f"parallel: data {sizes.data} x expert {sizes.expert} x context {sizes.context} is "
            f"{sizes.ranks} ranks, but {world_size} were started; change the sizes or start "
            f"torchrun with {sizes.ranks} processes"
        )
    if world_size == 1:
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
        yield _build_mesh(sizes, device)
    finally:
        dist.destroy_process_group()


def _build_mesh(sizes: ParallelDegrees, device: torch.device) -> Mesh:
    rank_DEC = torch.arange(sizes.ranks).view(sizes.data, sizes.expert, sizes.context)

    def mesh(ranks: torch.Tensor, *names: str) -> DeviceMesh:
        return DeviceMesh(device.type, ranks, mesh_dim_names=names)

    all_ranks = mesh(rank_DEC.flatten(), "all_ranks")
    data_context = mesh(rank_DEC.flatten(0, 1), "data_ranks", "context")
    expert_holders = mesh(rank_DEC.transpose(0, 1).flatten(1), "expert", "expert_fsdp")
    return Mesh(
        device=device,
        all_ranks=MeshDim(all_ranks),
        data_ranks=MeshDim(data_context["data_ranks"]),
        context=MeshDim(data_context["context"]),
        expert=MeshDim(expert_holders["expert"]),
        expert_fsdp=MeshDim(expert_holders["expert_fsdp"]),
    )
