"""Row-sharded matrices made whole, each on one rank, and dealt out again.

Each way is one all-to-all: a rank sends the rows it holds and receives the matrices it owns, both
about 1/n of all for n ranks. Gathering every matrix on every rank would move n times as much and
have all of them do the same work.
"""

from collections.abc import Sequence
from heapq import heapify, heapreplace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paddock.parallel.collectives import all_to_all_rows
from paddock.parallel.fsdp import local_rows
from paddock.parallel.mesh import MeshDim


class OptimizerOwners:
    """Who makes which matrix whole. All are sharded over the same ranks."""

    def __init__(self, matrices: Sequence[Tensor], costs: Sequence[float]) -> None:
        assert isinstance(matrices[0], DTensor)
        self._axis = MeshDim(matrices[0].device_mesh)
        self._rank, self._ranks = self._axis.rank, range(self._axis.size)
        owner = assign_balanced(costs, self._axis.size)
        self._owned = [[i for i, o in enumerate(owner) if o == rank] for rank in self._ranks]
        self._shapes = [tuple(matrix.shape) for matrix in matrices]
        self._rows = [[local_rows(m, rank=rank) for rank in self._ranks] for m in matrices]

    @property
    def local_indices(self) -> list[int]:
        """The matrices of this rank, as they count in the list."""
        return self._owned[self._rank]

    def gather(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """This rank's matrices from the rows all ranks hold of them."""
        sent = [rows[i].flatten() for owned in self._owned for i in owned]
        received = all_to_all_rows(
            torch.cat(sent),
            [self._numbers(owned, self._rank) for owned in self._owned],
            [self._numbers(self.local_indices, rank) for rank in self._ranks],
            self._axis,
        )
        whole = [received.new_empty(self._shapes[i]) for i in self.local_indices]
        pieces = iter(
            received.split([self._number(i, r) for r in self._ranks for i in self.local_indices])
        )
        for rank in self._ranks:
            for i, matrix in zip(self.local_indices, whole, strict=True):
                held = matrix[self._rows[i][rank]]
                held.copy_(next(pieces).view_as(held))
        return whole

    def scatter(self, whole: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        """Every matrix's rows on this rank, from its owner, into the tensors that were gathered."""
        sent = [
            matrix[self._rows[i][rank]].flatten()
            for rank in self._ranks
            for i, matrix in zip(self.local_indices, whole, strict=True)
        ]
        received = all_to_all_rows(
            torch.cat([rows[0].new_empty(0), *sent]),  # a rank may own nothing
            [self._numbers(self.local_indices, rank) for rank in self._ranks],
            [self._numbers(owned, self._rank) for owned in self._owned],
            self._axis,
        )
        order = [i for owned in self._owned for i in owned]
        for i, piece in zip(order, received.split([rows[i].numel() for i in order]), strict=True):
            rows[i].copy_(piece.view_as(rows[i]))

    def _number(self, i: int, rank: int) -> int:
        """How many numbers of matrix i a rank holds."""
        held = self._rows[i][rank]
        return (held.stop - held.start) * self._shapes[i][1]

    def _numbers(self, matrices: Sequence[int], rank: int) -> int:
        return sum(self._number(i, rank) for i in matrices)


def assign_balanced(costs: Sequence[float], ranks: int) -> list[int]:
    """A rank for each cost: the dearest first, each to the rank that has least to do.

    >>> assign_balanced([1.0, 5.0, 4.0, 2.0], 2)
    [0, 0, 1, 1]
    """
    loads = [(0.0, rank) for rank in range(ranks)]
    heapify(loads)
    owner = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, rank = loads[0]
        heapreplace(loads, (load + costs[i], rank))
        owner[i] = rank
    return owner
