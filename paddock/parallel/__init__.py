"""Many processes as one trainer: meshes, sharding, collectives. A single process is a mesh too.

collectives.py    sums, gathers and exchanges along an axis, differentiable where gradients pass
context_parallel.py  a row of tokens cut into pieces, one a rank
expert_parallel.py  rows that travel to the ranks of their experts and back
mesh.py           which ranks work together, and on what
optimizer_owners.py  row-sharded matrices made whole, each on one rank
fsdp.py           weights in shards (FSDP2), and whole again
weight_broadcast_group.py  a trainer's group, seen by those who receive its weights
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
