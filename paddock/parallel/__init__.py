"""Many processes as one trainer: meshes, sharding, collectives. A single process is a mesh too.

collectives.py    sums, gathers and exchanges along an axis, differentiable where gradients pass
context.py        a row of tokens cut into pieces, one a rank
expert.py         rows that travel to the ranks of their experts and back
mesh.py           which ranks work together, and on what
owners.py         row-sharded matrices made whole, each on one rank
shard.py          weights in shards (FSDP2), and whole again
weights_group.py  a trainer's group, seen by those who receive its weights
"""

from paddock.parallel.context import Cut
from paddock.parallel.expert import Trip
from paddock.parallel.mesh import (
    ALONE,
    SOLO,
    Axis,
    Mesh,
    MeshError,
    MeshSizes,
    is_first,
    open_mesh,
)
from paddock.parallel.shard import is_gathered

__all__ = [
    "ALONE",
    "SOLO",
    "Axis",
    "Cut",
    "Mesh",
    "MeshError",
    "MeshSizes",
    "Trip",
    "is_first",
    "is_gathered",
    "open_mesh",
]
