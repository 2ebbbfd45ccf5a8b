"""Many processes as one trainer: meshes, sharding, collectives. A single process is a mesh too.

collectives.py    sums, gathers and exchanges along an axis, differentiable where gradients pass
context_parallel.py  a row of tokens cut into pieces, one a rank
expert_parallel.py  rows that travel to the ranks of their experts and back
mesh.py           which ranks work together, and on what
optimizer_owners.py  row-sharded matrices made whole, each on one rank
fsdp.py           weights in shards (FSDP2), and whole again
weight_broadcast_group.py  a trainer's group, seen by those who receive its weights
"""

from paddock.parallel.context_parallel import ContextShard
from paddock.parallel.expert_parallel import ExpertDispatch
from paddock.parallel.fsdp import is_fsdp_module
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

__all__ = [
    "SINGLE_PROCESS",
    "SINGLE_RANK",
    "ContextShard",
    "ExpertDispatch",
    "Mesh",
    "MeshDim",
    "MeshError",
    "ParallelDegrees",
    "init_mesh",
    "is_fsdp_module",
    "is_rank_zero",
]
