"""Expert parallel: rows travel to the ranks that hold their experts, and answers travel back.

R rows, E experts of a layer, H experts held here, N ranks, D row width.
"""

import torch
from torch import Tensor
from torch import distributed as dist

from paddock.parallel.collectives import all_to_all_rows
from paddock.parallel.mesh import MeshDim


class ExpertDispatch:
    """Where the rows of one layer go. Rank n holds experts [n * H, (n + 1) * H).

    `counts_H` says how many rows each expert held here receives; `there` brings them sorted by
    expert, and of one expert in the order of the ranks they came from.
    """

    def __init__(self, counts_E: Tensor, axis: MeshDim) -> None:
        self._axis = axis
        self.counts_H = counts_E
        if axis.size == 1:
            return
        sent_NH = counts_E.view(axis.size, -1)
        came_NH = torch.empty_like(sent_NH)
        dist.all_to_all_single(came_NH, sent_NH, group=axis.group)
        self.counts_H = came_NH.sum(0)
        self._sent_N, self._came_N = sent_NH.sum(1).tolist(), came_NH.sum(1).tolist()
        # Rows arrive by sender and then by expert; a grouped product wants them by expert.
        expert_H = torch.arange(came_NH.shape[1], device=came_NH.device)
        expert_R = expert_H.repeat(axis.size).repeat_interleave(came_NH.flatten())
        self._order_R = expert_R.argsort(stable=True)

    def dispatch(self, x_RD: Tensor) -> Tensor:
        """From rows of this rank's tokens, sorted by expert, to rows for this rank's experts."""
        if self._axis.size == 1:
            return x_RD
        return all_to_all_rows(x_RD, self._sent_N, self._came_N, self._axis)[self._order_R]

    def combine(self, x_RD: Tensor) -> Tensor:
        """From answers of this rank's experts to answers for this rank's tokens."""
        if self._axis.size == 1:
            return x_RD
        arrived_RD = x_RD[self._order_R.argsort()]
        return all_to_all_rows(arrived_RD, self._came_N, self._sent_N, self._axis)
