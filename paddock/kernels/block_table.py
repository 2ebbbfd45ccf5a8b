"""Where the keys of a batch of sequences lie in a storage that all of them share.

B sequences, P pages of the longest, M = P * size keys at most.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class BlockTable:
    """Key m of sequence b is row page_BP[b, m // size] * size + m % size.

    Behind a sequence's last key the table may name any page there is: nobody looks.

    >>> BlockTable(torch.tensor([[2, 0]]), size=3).slot_BM
    tensor([[6, 7, 8, 0, 1, 2]])
    """

    page_BP: Tensor
    page_size: int

    @property
    def max_keys(self) -> int:
        return self.page_BP.shape[1] * self.page_size

    @cached_property
    def slot_BM(self) -> Tensor:
        """The row of every key."""
        if self.page_size == 1:
            return self.page_BP
        within = torch.arange(self.page_size, device=self.page_BP.device)
        return (self.page_BP.unsqueeze(-1) * self.page_size + within).flatten(1)

    def slot_mapping(self, index_NK: Tensor) -> Tensor:
        """The rows of some keys, N = B * Q queries of which each Q are one sequence's; -1 stays."""
        slot_NM = self.slot_BM
        if len(index_NK) != len(slot_NM):
            slot_NM = slot_NM.repeat_interleave(len(index_NK) // len(slot_NM), 0)
        return slot_NM.gather(1, index_NK.clamp(min=0).long()).masked_fill_(index_NK < 0, -1)
