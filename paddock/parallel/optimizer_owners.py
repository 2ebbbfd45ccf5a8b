"""Gather row-sharded matrices on owner ranks for the optimizer, and scatter the results.

Each direction is one all-to-all: a rank sends the rows it holds and receives the matrices it owns,
both about 1/n of all for n ranks. Gathering every matrix on every rank would move n times as much
and repeat the same work on each.
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
    """Assigns each matrix to an owner rank. All must be sharded over the same ranks."""

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
        """Indices of the matrices that this rank owns."""
        return self._owned[self._rank]

    def gather(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """The matrices this rank owns, gathered from the rows of all ranks."""
        sent = [rows[i].flatten() for owned in self._owned for i in owned]
        received = all_to_all_rows(
            torch.cat(sent),
            [self._total_elements(owned, self._rank) for owned in self._owned],
            [self._total_elements(self.local_indices, rank) for rank in self._ranks],
            self._axis,
        )
        matrices = [received.new_empty(self._shapes[i]) for i in self.local_indices]
        parts = iter(
            received.split(
                [self._num_elements(i, r) for r in self._ranks for i in self.local_indices]
            )
        )
        for rank in self._ranks:
            for i, matrix in zip(self.local_indices, matrices, strict=True):
                local = matrix[self._rows[i][rank]]
                local.copy_(next(parts).view_as(local))
        return matrices

    def scatter(self, matrices: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        """Send the rows of owned matrices back, into the `rows` they were gathered from."""
        sent = [
            matrix[self._rows[i][rank]].flatten()
            for rank in self._ranks
            for i, matrix in zip(self.local_indices, matrices, strict=True)
        ]
        received = all_to_all_rows(
            torch.cat([rows[0].new_empty(0), *sent]),  # a rank may own no matrix
            [self._total_elements(self.local_indices, rank) for rank in self._ranks],
            [self._total_elements(owned, self._rank) for owned in self._owned],
            self._axis,
        )
        order = [i for owned in self._owned for i in owned]
        for i, piece in zip(order, received.split([rows[i].numel() for i in order]), strict=True):
            rows[i].copy_(piece.view_as(rows[i]))

    def _num_elements(self, i: int, rank: int) -> int:
        """Number of elements of matrix i that a rank holds."""
        local = self._rows[i][rank]
        return (local.stop - local.start) * self._shapes[i][1]

    def _total_elements(self, matrices: Sequence[int], rank: int) -> int:
        return sum(self._num_elements(i, rank) for i in matrices)


def assign_balanced(costs: Sequence[float], ranks: int) -> list[int]:
    """A rank for each cost: the largest first, each to the least loaded rank.

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
