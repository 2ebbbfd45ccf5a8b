"""Expert parallelism: token rows are dispatched to the ranks of their experts and combined back.

R rows, E experts of a layer, H experts held here, N ranks, D row width.
"""

import torch
from torch import Tensor
from torch import distributed as dist

from paddock.parallel.collectives import all_to_all_rows
from paddock.parallel.mesh import MeshDim


class ExpertDispatch:
    """All-to-all dispatch of one layer's rows. Rank n holds experts [n * H, (n + 1) * H).

    `counts_H` is the number of rows for each local expert; `dispatch` returns them sorted by expert
    and, within an expert, by source rank.
    """

    def __init__(self, counts_E: Tensor, axis: MeshDim) -> None:
        self._axis = axis
        self.counts_H = counts_E
        if axis.size == 1:
            return
        sent_NH = counts_E.view(axis.size, -1)
        received_NH = torch.empty_like(sent_NH)
        dist.all_to_all_single(received_NH, sent_NH, group=axis.group)
        self.counts_H = received_NH.sum(0)
        self._sent_N, self._received_N = sent_NH.sum(1).tolist(), received_NH.sum(1).tolist()
        # Rows arrive by source rank and then by expert; the grouped GEMM needs them by expert.
        expert_H = torch.arange(received_NH.shape[1], device=received_NH.device)
        expert_R = expert_H.repeat(axis.size).repeat_interleave(received_NH.flatten())
        self._order_R = expert_R.argsort(stable=True)

    def dispatch(self, x_RD: Tensor) -> Tensor:
        """From rows of local tokens, sorted by expert, to rows for local experts."""
        if self._axis.size == 1:
            return x_RD
        return all_to_all_rows(x_RD, self._sent_N, self._received_N, self._axis)[self._order_R]

    def combine(self, x_RD: Tensor) -> Tensor:
        """From outputs of local experts to outputs for local tokens."""
        if self._axis.size == 1:
            return x_RD
        by_source_RD = x_RD[self._order_R.argsort()]
        return all_to_all_rows(by_source_RD, self._received_N, self._sent_N, self._axis)
