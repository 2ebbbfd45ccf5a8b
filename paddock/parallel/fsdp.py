"""FSDP2 weight sharding.

Every element of every parameter is stored on exactly one rank, in float32; each rank holds a slice
of a parameter's rows (its first dimension: whole experts of an expert stack). Before a block runs
its weights are all-gathered in the compute dtype, and freed afterwards. Each rank's loss is its
share of the total, so gradients are summed, not averaged.
"""

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from paddock.parallel.mesh import SINGLE_RANK, Mesh, MeshDim, MeshError


def apply_fsdp(
    network: nn.Module,
    mesh: Mesh,
    dtype: torch.dtype,
    *,
    blocks: Iterable[nn.Module],
    experts: Iterable[nn.Module] = (),
    exact: Iterable[nn.Module] = (),
) -> None:
    """Shard the network in place over the mesh.

    `blocks` are gathered one at a time, parameters outside them together. `experts` are already
    split along the expert dimension and are sharded over the ranks with the same experts. `exact`
    modules compute in float32 whatever the dtype. Each of these modules must be called as a module,
    by all ranks or by none (`is_fsdp_module`), because the call gathers its weights.
    """
    if torch.__version__ < "2.13":
        # Older versions find gradients only in tuples and lists; our layers return dataclasses.
        raise MeshError(
            f"more than one process needs torch 2.13 or newer, found {torch.__version__}"
        )
    # A returned view matters only if it is written to; no output is written in place here.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view", UserWarning)
    # Inputs keep their dtype: rotary angles and masks among them must stay exact.
    full = MixedPrecisionPolicy(cast_forward_inputs=False)
    rounded = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for module in exact:
        fully_shard(module, mesh=mesh.all_ranks.mesh, mp_policy=full)
    for module in experts:
        fully_shard(module, mesh=mesh.expert_fsdp.mesh, mp_policy=rounded)
    for module in (*blocks, network):
        fully_shard(module, mesh=mesh.all_ranks.mesh, mp_policy=rounded)
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def is_fsdp_module(module: nn.Module) -> bool:
    """Whether calling this module gathers its weights, so that all ranks must call it."""
    return isinstance(module, FSDPModule)


def to_local(x: Tensor) -> Tensor:
    """The local shard of a tensor, without a copy; the tensor itself if it is not sharded."""
    return x.to_local() if isinstance(x, DTensor) else x


def is_row_sharded(matrix: Tensor) -> bool:
    """Whether the rows of a matrix are sharded; a stack is sharded between its matrices."""
    return isinstance(matrix, DTensor) and matrix.ndim == 2 and matrix.device_mesh.size() > 1


def local_rows(parameter: Tensor, split: MeshDim = SINGLE_RANK, rank: int | None = None) -> slice:
    """The rows of the whole parameter that this rank, or `rank` of its mesh, holds.

    `split` is the dimension that an expert stack was split along before it was sharded.
    """
    rows, start = parameter.shape[0], split.rank * parameter.shape[0]
    if not isinstance(parameter, DTensor):
        return slice(start, start + rows)
    mesh = parameter.device_mesh
    each = -(-rows // mesh.size())  # FSDP2 shards like torch.chunk: the last ranks may be empty
    index = mesh.get_local_rank() if rank is None else rank
    return slice(start + min(rows, index * each), start + min(rows, (index + 1) * each))
