"""Distributed training: device mesh, FSDP, expert and context parallelism, weight broadcast.

collectives.py    all-reduce, all-gather and all-to-all along a mesh dimension, differentiable
context_parallel.py  context parallelism: a row of tokens sharded over ranks
expert_parallel.py  expert parallelism: token dispatch to the ranks of their experts and back
mesh.py           device mesh: data, expert and context dimensions
optimizer_owners.py  gathers row-sharded matrices on owner ranks for the optimizer
fsdp.py           FSDP2 weight sharding
weight_broadcast_group.py  weight sync: process group that receives a trainer's broadcasts
"""

from paddock.parallel.collectives import (
    all_reduce_max,
    all_reduce_sum,
    gather_to_rank_zero,
    global_norm,
)
from paddock.parallel.context_parallel import ContextShard
from paddock.parallel.expert_parallel import ExpertDispatch
from paddock.parallel.fsdp import apply_fsdp, is_fsdp_module, is_row_sharded, local_rows, to_local
from paddock.parallel.mesh import (
    SINGLE_PROCESS,
    SINGLE_RANK,
    Mesh,
    MeshDim,
    MeshError,
    ParallelDegrees,
    init_mesh,
    is_rank_zero,
)
from paddock.parallel.optimizer_owners import OptimizerOwners
from paddock.parallel.weight_broadcast_group import (
    Rendezvous,
    WeightBroadcastError,
    WeightBroadcastGroup,
)

__all__ = [
    "SINGLE_PROCESS",
    "SINGLE_RANK",
    "ContextShard",
    "ExpertDispatch",
    "Mesh",
    "MeshDim",
    "MeshError",
    "OptimizerOwners",
    "ParallelDegrees",
    "Rendezvous",
    "WeightBroadcastError",
    "WeightBroadcastGroup",
    "all_reduce_max",
    "all_reduce_sum",
    "apply_fsdp",
    "gather_to_rank_zero",
    "global_norm",
    "init_mesh",
    "is_fsdp_module",
    "is_rank_zero",
    "is_row_sharded",
    "local_rows",
    "to_local",
]
