"""Context parallel: a row of tokens cut into contiguous pieces, one a rank.

Each rank computes its own tokens and gathers what they look at from the others. With latent
attention that is one narrow row a token and layer, so gathering it whole costs less than passing
queries around. Later ranks look back further and have more to do.

T tokens of this rank, S tokens of the row.
"""

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from paddock.parallel.collectives import all_gather_rows
from paddock.parallel.mesh import MeshDim, MeshError


@dataclass(frozen=True, slots=True)
class ContextShard:
    """A row of `tokens` along an axis. Pieces differ by one token at most."""

    axis: MeshDim
    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < self.axis.size:
            raise MeshError(f"{self.tokens} tokens cannot be cut over {self.axis.size} ranks")

    @property
    def local_slice(self) -> slice:
        """Where this rank's tokens stand in the row."""
        return slice(self._start(self.axis.rank), self._start(self.axis.rank + 1))

    def all_gather(self, x_T: Tensor) -> Tensor:
        """What all ranks have of the row, in its order; gradients find their way back."""
        starts = [self._start(rank) for rank in range(self.axis.size + 1)]
        sizes = [stop - start for start, stop in pairwise(starts)]
        return all_gather_rows(x_T, sizes, self.axis)

    def _start(self, rank: int) -> int:
        return self.tokens * rank // self.axis.size
