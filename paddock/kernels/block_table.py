"""Block table of a paged KV cache: which storage slots hold the keys of each sequence.

B sequences, P pages of the longest, M = P * page_size its maximum number of keys.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class BlockTable:
    """Key m of sequence b is slot page_BP[b, m // page_size] * page_size + m % page_size.

    Entries after the last page of a sequence may be any valid page; they are not read.

    >>> BlockTable(torch.tensor([[2, 0]]), page_size=3).slot_BM
    tensor([[6, 7, 8, 0, 1, 2]])
    """

    page_BP: Tensor
    page_size: int

    @property
    def max_keys(self) -> int:
        return self.page_BP.shape[1] * self.page_size

    @cached_property
    def slot_BM(self) -> Tensor:
        """The storage slot of every key."""
        if self.page_size == 1:
            return self.page_BP
        offset = torch.arange(self.page_size, device=self.page_BP.device)
        return (self.page_BP.unsqueeze(-1) * self.page_size + offset).flatten(1)

    def slot_mapping(self, index_NK: Tensor) -> Tensor:
        """Storage slots of selected keys for N = B * Q queries, Q per sequence; -1 stays -1."""
        slot_NM = self.slot_BM
        if len(index_NK) != len(slot_NM):
            slot_NM = slot_NM.repeat_interleave(len(index_NK) // len(slot_NM), 0)
        return slot_NM.gather(1, index_NK.clamp(min=0).long()).masked_fill_(index_NK < 0, -1)
