"""Weights in shards by FSDP2, and whole again.

Every element of every parameter lives on exactly one rank, in float32, and each rank holds a run of
a parameter's rows (its first dimension: of a stack of experts, whole experts). Before a block runs
its weights are gathered, rounded to the dtype of the products, and dropped when it is done. Each
rank's loss is its share of the whole, so gradients are summed, never averaged.
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
    """Leave this rank its shards on the mesh's device.

    `blocks` are gathered one at a time, what is in none of them together. `experts` have been split
    along the expert axis and are sharded over those that hold the same ones. `exact` modules
    compute in float32 whatever the dtype. All of them must be called, not read, and by all ranks
    or by none (`is_gathered`).
    """
    if torch.__version__ < "2.13":
        # Older ones look for gradients in tuples and lists alone; our layers return dataclasses.
        raise MeshError(f"more than one process needs torch 2.13, this is {torch.__version__}")
    # A view is dangerous only to those who write into it; nobody here writes into an output.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view", UserWarning)
    # Inputs stay as they are: angles and masks among them are exact on purpose.
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
    """Whether a call of this module gathers its weights from all ranks: then all must call it."""
    return isinstance(module, FSDPModule)


def to_local(x: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharing its memory; all of it, if it is not sharded."""
    return x.to_local() if isinstance(x, DTensor) else x


def is_row_sharded(matrix: Tensor) -> bool:
    """Whether other ranks hold rows of this very matrix; a stack is sharded between matrices."""
    return isinstance(matrix, DTensor) and matrix.ndim == 2 and matrix.device_mesh.size() > 1


def local_rows(parameter: Tensor, split: MeshDim = SINGLE_RANK, rank: int | None = None) -> slice:
    """The rows of the whole parameter that this rank of its shard mesh holds, or another one.

    `split` is the axis a stack was split along before it was sharded.
    """
    rows, start = parameter.shape[0], split.rank * parameter.shape[0]
    if not isinstance(parameter, DTensor):
        return slice(start, start + rows)
    mesh = parameter.device_mesh
    each = -(-rows // mesh.size())  # FSDP2 deals as torch.chunk does: the last ranks may go empty
    index = mesh.get_local_rank() if rank is None else rank
    return slice(start + min(rows, index * each), start + min(rows, (index + 1) * each))
