"""Context parallelism: a row of tokens sharded into contiguous pieces, one per rank.

Each rank computes its own tokens and gathers the KV entries of the others. With MLA that is one
narrow latent entry per token and layer, so gathering all of them costs less than passing queries
around. Later ranks attend to more keys and have more work.

T tokens of this rank, S tokens of the row.
"""

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from paddock.parallel.collectives import all_gather_rows
from paddock.parallel.mesh import MeshDim, MeshError


@dataclass(frozen=True, slots=True)
class ContextShard:
    """Sharding of a row of `tokens` along an axis. Shard sizes differ by at most one token."""

    axis: MeshDim
    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < self.axis.size:
            raise MeshError(f"{self.tokens} tokens cannot be sharded over {self.axis.size} ranks")

    @property
    def local_slice(self) -> slice:
        """This rank's tokens in the row."""
        return slice(self._start(self.axis.rank), self._start(self.axis.rank + 1))

    def all_gather(self, x_T: Tensor) -> Tensor:
        """The whole row from all ranks' shards, in order; differentiable."""
        starts = [self._start(rank) for rank in range(self.axis.size + 1)]
        sizes = [stop - start for start, stop in pairwise(starts)]
        return all_gather_rows(x_T, sizes, self.axis)

    def _start(self, rank: int) -> int:
        return self.tokens * rank // self.axis.size
